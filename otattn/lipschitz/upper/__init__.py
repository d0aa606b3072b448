"""Upper bounds over all measures of a domain, one module a theorem or a family of them."""

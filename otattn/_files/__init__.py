"""Files: numpy archives that come from elsewhere, and values of this package kept in one of its own."""

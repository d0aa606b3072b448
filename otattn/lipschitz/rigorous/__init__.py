"""Certificates near given tokens, proved in ball and interval arithmetic from the floats as exact numbers."""

"""A fleet that scales, routes and refuses, watched while real clients ask."""

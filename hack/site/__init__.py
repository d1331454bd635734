"""The site of the documentation: what its pages are, what a link may name, and how it is built."""

"""The module zoo: many kinds of modules and folders; each is exact, refused with a remedy, or exact by that remedy."""

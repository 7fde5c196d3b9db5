"""The module zoo: many kinds of module and folder, each exact, refused with a remedy, or exact by that remedy."""

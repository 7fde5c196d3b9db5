"""Uses of parameters in a module from elsewhere: map each torch function to an operation with a per-sample rule."""

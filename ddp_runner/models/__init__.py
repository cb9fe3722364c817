"""Models: plain modules that import only torch and the library that they wrap."""

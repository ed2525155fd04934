"""Documents of `hil web`: the JSON form of its pages."""

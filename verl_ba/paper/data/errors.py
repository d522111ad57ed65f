"""What is wrong with data, for the person at the command line."""


class DataError(Exception):
    """Data that cannot be built or does not match its record: what, where, expected, got, what to do."""


class RowError(DataError):
    """One row of a source that cannot be used; `build` adds where it is."""

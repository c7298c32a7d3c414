"""A round, the same for every engine: dispatch, train, aggregate, measure, record."""

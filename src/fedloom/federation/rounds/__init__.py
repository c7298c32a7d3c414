"""What a round does, the same for every engine: dispatch, train, aggregate, measure, record."""

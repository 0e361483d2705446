//! A first guess of an engine's cost coefficients: a few steps on an empty pool before it serves.

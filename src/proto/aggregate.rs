//! Per-rank reports to the outcome per request.

//! The scheduler side's state machine.

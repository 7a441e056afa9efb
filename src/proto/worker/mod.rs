//! The worker side's state machine.

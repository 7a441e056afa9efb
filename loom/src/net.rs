//! The listener's flags.

#[path = "../../src/net/shared.rs"]
mod shared;

use loom::sync::Arc;
use loom::thread;
use shared::Shared;

use crate::error::Error;

/// The thread ends when it is told to, and is not left asleep.
#[test]
fn a_stop_is_not_slept_through() {
    loom::model(|| {
        let shared = Arc::new(Shared::new().unwrap());
        let listener = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                while !shared.is_stopped() {
                    // It sleeps until the descriptor is readable, which it stays.
                    while shared.fd() == 0 {
                        thread::yield_now();
                    }
                }
                shared.end();
            })
        };
        shared.stop();
        listener.join().unwrap();
        assert!(!shared.is_alive() && shared.failure().is_none());
    });
}

/// Whoever sees that the thread has ended sees why.
#[test]
fn the_reason_is_there_before_the_end() {
    loom::model(|| {
        let shared = Arc::new(Shared::new().unwrap());
        let listener = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.count_request();
                shared.fail(Error(7));
                shared.end();
            })
        };
        if !shared.is_alive() {
            assert_eq!(shared.failure(), Some(Error(7)));
        }
        listener.join().unwrap();
        assert_eq!((shared.failure(), shared.requests()), (Some(Error(7)), 1));
    });
}

//! The listener's flags.

#[path = "../../src/net/flags.rs"]
mod flags;

use loom::sync::Arc;
use loom::thread;
use flags::ListenerFlags;

use crate::error::Error;

/// The thread ends when it is told to, and is not left asleep.
#[test]
fn a_stop_is_not_slept_through() {
    loom::model(|| {
        let flags = Arc::new(ListenerFlags::new().unwrap());
        let listener = {
            let flags = Arc::clone(&flags);
            thread::spawn(move || {
                while !flags.is_stopped() {
                    // It sleeps until the descriptor is readable, which it stays.
                    while flags.fd() == 0 {
                        thread::yield_now();
                    }
                }
                flags.end();
            })
        };
        flags.stop();
        listener.join().unwrap();
        assert!(!flags.is_alive() && flags.failure().is_none());
    });
}

/// Whoever sees that the thread has ended sees why.
#[test]
fn the_reason_is_there_before_the_end() {
    loom::model(|| {
        let flags = Arc::new(ListenerFlags::new().unwrap());
        let listener = {
            let flags = Arc::clone(&flags);
            thread::spawn(move || {
                flags.count_request();
                flags.fail(Error(7));
                flags.end();
            })
        };
        if !flags.is_alive() {
            assert_eq!(flags.failure(), Some(Error(7)));
        }
        listener.join().unwrap();
        assert_eq!((flags.failure(), flags.requests()), (Some(Error(7)), 1));
    });
}

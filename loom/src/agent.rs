//! The agent's queues and its waker.

mod event {
    pub enum Direction {
        Read,
    }
    #[derive(Debug, PartialEq)]
    pub enum Event {
        Message { peer: u32, data: Vec<u8> },
        Other(u32),
    }
}

mod ids {
    pub struct IdSource;
    impl IdSource {
        pub fn new(_: u64) -> Self {
            IdSource
        }
    }
    pub type PeerId = u32;
    pub type TransferId = u32;
    pub type RegionId = u32;
}

mod route {
    pub struct Route;
}

mod stats {
    pub struct AgentStats;
}

#[path = "../../src/agent/shared.rs"]
mod shared;
#[path = "../../src/agent/waker.rs"]
mod waker;

use std::collections::VecDeque;
use std::time::Duration;

use event::Event;
use loom::sync::Arc;
use loom::thread;
use shared::{Command, Shared};

/// A thread gives two commands; the ferry thread, which sleeps only while its descriptor is not readable and no wake-up
/// is pending, serves both.
#[test]
fn no_command_is_slept_through() {
    loom::model(|| {
        let shared = Arc::new(Shared::new(0).unwrap());
        let giver = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.command(Command::Disconnect { peer: 1 });
                shared.command(Command::Disconnect { peer: 2 });
            })
        };
        let mut served = 0;
        while served < 2 {
            // As `Loop::serve_commands` and `Loop::wait`.
            if shared.waker.is_pending() || shared.waker.fd() != 0 {
                shared.waker.drain();
                while shared.next_command().is_some() {
                    served += 1;
                }
            } else {
                thread::yield_now();
            }
        }
        giver.join().unwrap();
        assert!(shared.next_command().is_none());
    });
}

/// Whatever a drain and a wake-up do to each other, the next wake-up gets through.
#[test]
fn a_drained_waker_can_be_woken_again() {
    loom::model(|| {
        let waker = waker::Waker::new().unwrap();
        let other = waker.clone();
        let giver = thread::spawn(move || other.wake());
        waker.drain();
        giver.join().unwrap();
        waker.wake();
        assert!(waker.is_pending() && waker.fd() != 0, "the loop is woken");
    });
}

/// A waiter gets the event that is published, or learns of the end, and what was counted as unread is read.
#[test]
fn a_waiter_gets_each_event_once_or_the_end() {
    loom::model(|| {
        let shared = Arc::new(Shared::new(0).unwrap());
        let ferry = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let mut events = VecDeque::from([Event::Message { peer: 1, data: vec![1, 2, 3] }]);
                shared.publish(&mut events);
                shared.end();
            })
        };
        let first = shared.wait_event(Duration::from_secs(1));
        assert_eq!(first, Some(Event::Message { peer: 1, data: vec![1, 2, 3] }));
        assert_eq!(shared.wait_event(Duration::from_secs(1)), None, "the end wakes the waiter");
        ferry.join().unwrap();
        assert_eq!(shared.unread_bytes(), 0);
    });
}

/// Two pollers share what is published.
#[test]
fn two_pollers_get_each_event_once() {
    loom::model(|| {
        let shared = Arc::new(Shared::new(0).unwrap());
        let poller = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || u32::from(shared.poll_event().is_some()))
        };
        shared.publish(&mut VecDeque::from([Event::Other(1), Event::Message { peer: 1, data: vec![7] }]));
        let mut got = 0;
        while shared.poll_event().is_some() {
            got += 1;
        }
        assert_eq!(got + poller.join().unwrap(), 2);
        assert_eq!(shared.unread_bytes(), 0);
    });
}

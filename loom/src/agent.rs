//! The agent's queues and its waker.

#[path = "../../src/agent/core"]
pub mod core {
    pub mod event {
        #[derive(Debug, PartialEq)]
        pub enum Event {
            Message { peer: u32, data: Vec<u8> },
            Other(u32),
        }

        impl Event {
            pub fn not_done((id, _): (u32, u64), _: u32, _: crate::error::Error, _: std::time::Instant) -> Self {
                Event::Other(id)
            }
        }
    }

    pub mod id_map;

    pub mod limits {
        pub const LIGHT_BYTES: u64 = 1;
    }

    pub mod live;
    pub mod reply;

    pub mod request {
        pub struct TransferRequest {
            pub id: u32,
        }
        impl TransferRequest {
            pub fn is_light(&self) -> bool {
                true
            }
        }
    }

    pub mod ids {
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

    pub mod route {
        pub struct Route;
    }

    pub mod stats {
        pub struct AgentStats;
        pub struct PeerStats;
    }
}

#[path = "../../src/agent/command.rs"]
mod shared;
#[path = "../../src/agent/thread"]
pub mod thread {
    pub mod waker;
}

use std::collections::VecDeque;
use std::time::Duration;

use core::event::Event;
use loom::sync::Arc;
use shared::{Command, Shared};

/// A turn of the loop: takes what is there and sleeps if it may, as `Loop::serve_commands` and `Loop::sleep` do. Returns
/// how many commands there were, and whether the thread slept.
fn turn(shared: &Shared) -> (u32, bool) {
    let mut served = 0;
    if shared.waker.take() {
        while shared.next_command().is_some() {
            served += 1;
        }
        return (served, false);
    }
    let lay_down = shared.waker.lie_down();
    if lay_down && shared.waker.fd() == 0 {
        while shared.waker.fd() == 0 {
            loom::thread::yield_now();
        }
        shared.waker.get_up(true);
        return (0, true);
    }
    shared.waker.get_up(shared.waker.fd() != 0);
    (0, false)
}

/// A thread gives two commands; the progress thread, which sleeps until its descriptor is readable, serves both.
#[test]
fn no_command_is_slept_through() {
    loom::model(|| {
        let shared = Arc::new(Shared::new(0).unwrap());
        let giver = {
            let shared = Arc::clone(&shared);
            loom::thread::spawn(move || {
                shared.command(Command::Disconnect { peer: 1 });
                shared.command(Command::Disconnect { peer: 2 });
            })
        };
        let mut served = 0;
        while served < 2 {
            served += turn(&shared).0;
        }
        giver.join().unwrap();
        assert!(shared.next_command().is_none());
    });
}

/// However late those who wake come to raise the descriptor: once they have, and all is served, the thread lies down in
/// one turn, and does not find it readable again and again.
#[test]
fn a_late_raise_does_not_keep_the_thread_up() {
    loom::model(|| {
        let shared = Arc::new(Shared::new(0).unwrap());
        let givers = [1, 2].map(|peer| {
            let shared = Arc::clone(&shared);
            loom::thread::spawn(move || shared.command(Command::Disconnect { peer }))
        });
        let mut served = 0;
        while served < 2 {
            served += turn(&shared).0;
        }
        for giver in givers {
            giver.join().unwrap();
        }
        // A wake-up may come when its command was served with another one's.
        shared.waker.take();
        if shared.waker.fd() != 0 {
            assert!(shared.waker.lie_down());
            shared.waker.get_up(true);
        }
        assert!(shared.waker.lie_down() && shared.waker.fd() == 0, "the thread can sleep");
        shared.waker.wake();
        assert!(shared.waker.fd() != 0, "and is woken");
    });
}

/// A waiter gets the event that is published, or learns of the end, and what was counted as unread is read.
#[test]
fn a_waiter_gets_each_event_once_or_the_end() {
    loom::model(|| {
        let shared = Arc::new(Shared::new(0).unwrap());
        let progress = {
            let shared = Arc::clone(&shared);
            loom::thread::spawn(move || {
                let mut events = VecDeque::from([Event::Message { peer: 1, data: vec![1, 2, 3] }]);
                shared.publish(&mut events);
                shared.end();
            })
        };
        let first = shared.wait_event(Duration::from_secs(1));
        assert_eq!(first, Some(Event::Message { peer: 1, data: vec![1, 2, 3] }));
        assert_eq!(shared.wait_event(Duration::from_secs(1)), None, "the end wakes the waiter");
        progress.join().unwrap();
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
            loom::thread::spawn(move || u32::from(shared.poll_event().is_some()))
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

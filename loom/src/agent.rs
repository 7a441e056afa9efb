//! The agent's queues, its waker, and callers that drive the engine in the progress thread's place.

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
    pub mod callers;
    pub mod waker;
}

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use core::event::Event;
use loom::sync::Arc;
use shared::{Command, Shared};
use thread::callers::{Callers, Polled};

use crate::sys::isolated::{Gone, Isolated};

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

/// What is lent in place of an engine.
struct Engine {
    shared: Arc<Shared>,
    callers: Arc<Callers>,
    /// Whether the progress thread stands aside, as the engine knows it.
    aside: bool,
    served: u32,
}

impl Engine {
    /// Whoever has the engine can rely on what `Callers` says of who drives it.
    fn check(&self) {
        assert_eq!(self.callers.drive(), self.aside);
    }

    /// Returns whether there was anything to serve.
    fn serve(&mut self) -> bool {
        let before = self.served;
        while self.shared.next_command().is_some() {
            self.served += 1;
        }
        self.served > before
    }
}

/// What the handle and the progress thread have of an agent.
#[derive(Clone)]
struct Lent {
    shared: Arc<Shared>,
    callers: Arc<Callers>,
    engine: Arc<Isolated<Engine>>,
    /// All that happens is at one time: callers that poll do so without a pause.
    now: Instant,
}

impl Lent {
    /// Of an agent whose caller has polled without a pause for a while.
    fn new() -> Lent {
        let now = Instant::now();
        let (shared, callers) = (Arc::new(Shared::new(0).unwrap()), Arc::new(Callers::new(now)));
        while !callers.are_polling(now) {
            callers.poll(now);
        }
        let (for_engine, for_callers) = (Arc::clone(&shared), Arc::clone(&callers));
        let engine =
            Isolated::new(|| Ok::<_, ()>(Engine { shared: for_engine, callers: for_callers, aside: false, served: 0 }));
        Lent { shared, callers, engine: Arc::new(engine.unwrap()), now }
    }

    /// The progress thread's turn, as in `event_loop::run`: it serves, and stands aside where a caller polls. Returns how
    /// many commands were served so far, by whomever.
    fn turn(&self) -> u32 {
        self.callers.want(true);
        let turned = self.engine.with(|engine| {
            self.callers.want(false);
            engine.check();
            self.callers.leave();
            engine.aside = false;
            if self.shared.waker.take() {
                engine.serve();
            }
            if self.callers.are_polling(self.now) {
                self.callers.enter();
                engine.aside = true;
            }
            engine.served
        });
        turned.unwrap()
    }

    /// Lends the engine to a caller, as `Inner::try_with` does.
    fn try_with<R: Send>(&self, use_it: impl FnOnce(&mut Engine) -> R + Send) -> Option<R> {
        if self.callers.may_take() { self.engine.try_with(use_it) } else { None }
    }

    /// A caller gives a command, and serves it if it gets the engine, as `Inner::serve_at_once` does.
    fn give(&self) {
        self.shared.queue(Command::Disconnect { peer: 1 });
        let serve = |engine: &mut Engine| {
            engine.check();
            engine.serve();
        };
        if self.try_with(serve).is_none() {
            self.shared.waker.wake();
        }
    }

    /// A caller polls, as `Inner::poll` does. Returns whether it drove the engine.
    fn poll(&self) -> bool {
        match self.callers.poll(self.now) {
            Polled::Nothing => return false,
            Polled::Ask => self.shared.waker.wake(),
            Polled::Drive => {}
        }
        let drive = |engine: &mut Engine| {
            engine.check();
            if engine.serve() && !engine.aside {
                self.shared.waker.wake();
            }
        };
        self.try_with(drive).is_some()
    }
}

/// One caller gives commands and another one polls, while the progress thread stands aside and is woken: each command is
/// served, by the thread or by a caller, and whoever has the engine knows who drives it.
#[test]
fn each_command_is_served_whoever_drives() {
    loom::model(|| {
        let lent = Lent::new();
        let giver = {
            let lent = lent.clone();
            loom::thread::spawn(move || lent.give())
        };
        let poller = {
            let lent = lent.clone();
            loom::thread::spawn(move || lent.poll())
        };
        lent.turn();
        giver.join().unwrap();
        poller.join().unwrap();
        // Whoever did not get the engine has woken the thread.
        let is_woken = lent.shared.waker.take();
        if is_woken {
            lent.shared.waker.wake();
            assert_eq!(lent.turn(), 1);
        }
        assert_eq!(lent.engine.with(|engine| (engine.aside, engine.served)), Ok((true, 1)));
        // The thread does not want the engine any more: a poll drives it.
        assert!(lent.poll());
    });
}

/// The engine is ended, or cleared after a panic, while a caller tries to use it: it ends once, behind what the caller does,
/// who does not wait for that end.
#[test]
fn the_engine_ends_while_a_caller_tries_to_use_it() {
    for is_cleared in [false, true] {
        loom::model(move || {
            let lent = Lent::new();
            lent.turn();
            let caller = {
                let lent = lent.clone();
                loom::thread::spawn(move || {
                    lent.poll();
                    lent.engine.with(|engine| engine.check())
                })
            };
            let found = if is_cleared {
                lent.engine.clear();
                caller.join().unwrap()
            } else {
                lent.engine.end(|_| caller.join().unwrap()).unwrap()
            };
            assert!(found == Ok(()) || found == Err(Gone::Ended));
            assert_eq!(lent.engine.try_with(|_| ()), None);
            assert_eq!(lent.engine.end(|_| ()), Err(Gone::Ended));
        });
    }
}

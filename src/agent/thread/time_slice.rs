//! How long the progress thread's turns on a processor are to be: short when it wakes, long when it has been busy for a
//! while.
//!
//! A thread that asks for short turns gets the first one soon after it is woken, which is what a message needs that comes
//! while engines compute. But as long as it stays busy it then also comes before threads that wake and have not asked, such
//! as the one that waits for the transfer that has just ended: those wait for the kernel's next tick, up to 4 ms, or until
//! the thread's wish changes. With two such threads on two processors a block behind 512 MiB over TCP takes half as long when
//! long turns begin after 100 us as with short turns alone (`kvferry bench behind`).

use std::io;
use std::time::{Duration, Instant};

use crate::sys::thread::ask_for_turns;

/// The shortest that there are. Threads that compute have some milliseconds each.
const SHORT: Duration = Duration::from_micros(100);
/// Longer than those of threads that ask for nothing.
const LONG: Duration = Duration::from_millis(20);
/// How long a thread is busy, from when it woke, before its turns become long. A request's messages are through by then.
const BUSY: Duration = Duration::from_micros(100);

/// The turns that the calling thread has asked for.
pub(crate) struct TimeSlice {
    woken: Instant,
    long: bool,
    /// Whether the kernel takes such wishes.
    heard: bool,
}

impl TimeSlice {
    /// Asks for short ones.
    ///
    /// # Errors
    /// With what the kernel says when it does not take that; then nothing is asked for any more.
    pub(crate) fn new(now: Instant) -> (Self, io::Result<()>) {
        let asked = ask_for_turns(SHORT);
        (TimeSlice { woken: now, long: false, heard: asked.is_ok() }, asked)
    }

    /// The thread had work to do and goes on. Not for one that only spins: its next turn would come late after the long one.
    pub(crate) fn work(&mut self, now: Instant) {
        if self.heard && !self.long && now.saturating_duration_since(self.woken) >= BUSY {
            self.ask(true);
        }
    }

    /// The thread is going to sleep, or gives way to others.
    pub(crate) fn sleep(&mut self) {
        if self.long {
            self.ask(false);
        }
    }

    /// The thread has slept.
    pub(crate) fn wake(&mut self, now: Instant) {
        self.woken = now;
    }

    fn ask(&mut self, long: bool) {
        self.long = long;
        self.heard = ask_for_turns(if long { LONG } else { SHORT }).is_ok();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn turns_become_long_with_work_and_short_with_sleep() {
        let start = Instant::now();
        let at = |micros| start + Duration::from_micros(micros);
        let (mut turns, asked) = TimeSlice::new(start);
        if let Err(error) = asked {
            // Such as a container's filter of system calls: then nothing may be asked for again.
            eprintln!("SKIPPED: the kernel takes no wishes about turns: {error}");
            turns.work(at(100));
            assert!(!turns.long);
            return;
        }
        turns.work(at(90));
        assert!(!turns.long);
        turns.work(at(100));
        assert!(turns.long);
        turns.sleep();
        assert!(!turns.long);
        turns.wake(at(5000));
        turns.work(at(5090));
        assert!(!turns.long);
        turns.work(at(5110));
        assert!(turns.long && turns.heard);
    }
}

//! When a progress thread may spin.
//!
//! Spinning pays while a processor has nothing better to do. An agent spins alone in most processes; where a process
//! has many, such as an engine of 64 ranks, all of them are asked at once when a peer first comes, and each would then
//! keep a processor from those that have work. On two processors, first contact with 64 ranks took a third longer until
//! all was reported when all spun, and a tenth longer when one spun at a time while the others were being woken.
//!
//! A thread that spins gives way to others that wait for its processor, among them the peer that it waits for where that is
//! on the same host. When it does not come back soon, there are more threads with work than processors. Then it sleeps
//! instead: what comes to a socket wakes it ahead of those.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Who waits this long for a processor that it gave away would have been woken earlier.
const LONG_AWAY: Duration = Duration::from_micros(500);
/// So many times as long it does not spin after that, so that at most a ninth of its time is lost this way.
const REST: u32 = 8;
/// What counts of that at most: a process that was stopped was away for another reason.
const LONGEST: Duration = Duration::from_millis(50);

/// The progress threads of one process.
#[derive(Debug)]
struct Crowd {
    /// How many spin.
    spinning: AtomicUsize,
    /// How often any of them was woken.
    wakes: AtomicU64,
}

impl Crowd {
    const fn new() -> Self {
        Crowd { spinning: AtomicUsize::new(0), wakes: AtomicU64::new(0) }
    }
}

static CROWD: Crowd = Crowd::new();

/// One thread's leave to spin.
#[derive(Debug)]
pub(crate) struct Spinner {
    crowd: &'static Crowd,
    /// So many at most spin at once, and so many others may be woken meanwhile.
    most: usize,
    spins: bool,
    /// When the thread was woken last, and the number of that.
    woken: (Instant, u64),
    /// Whether too many others are expected to be woken soon.
    crowded: bool,
    /// Until when there are more threads than processors, as far as is known.
    full_until: Instant,
}

impl Spinner {
    /// For half of the processors, at least one.
    pub(crate) fn new() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Spinner::among(&CROWD, (processors / 2).max(1), Instant::now())
    }

    /// For a thread that is the only one.
    #[cfg(test)]
    pub(crate) fn alone(now: Instant) -> Self {
        static NOBODY: Crowd = Crowd::new();
        Spinner::among(&NOBODY, 1, now)
    }

    fn among(crowd: &'static Crowd, most: usize, now: Instant) -> Self {
        // Nothing else depends on any of the numbers.
        let woken = (now, crowd.wakes.load(Ordering::Relaxed));
        Spinner { crowd, most, spins: false, woken, crowded: false, full_until: now }
    }

    /// The thread was woken, and may come to spin for as long as `spin`.
    pub(crate) fn wake(&mut self, now: Instant, spin: Duration) {
        let number = self.crowd.wakes.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let (before, last) = std::mem::replace(&mut self.woken, (now, number));
        // As many as were woken since it was woken itself, by the time that passed.
        let others = number.wrapping_sub(last).saturating_sub(1);
        let passed = now.saturating_duration_since(before).as_nanos();
        self.crowded = u128::from(others) * spin.as_nanos() > self.most as u128 * passed;
    }

    /// Whether the thread may spin, or go on spinning.
    pub(crate) fn may_spin(&mut self, now: Instant) -> bool {
        let others = self.crowd.wakes.load(Ordering::Relaxed).wrapping_sub(self.woken.1);
        if now < self.full_until || self.crowded || others > self.most as u64 {
            self.rest();
            return false;
        }
        let spinning = &self.crowd.spinning;
        let join = || spinning.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < self.most).then_some(n + 1));
        self.spins = self.spins || join().is_ok();
        self.spins
    }

    /// Lets go first who waits for this processor.
    pub(crate) fn give_way(&mut self) {
        let begin = Instant::now();
        std::thread::yield_now();
        self.is_back(begin, Instant::now());
    }

    fn is_back(&mut self, begin: Instant, now: Instant) {
        let away = now.saturating_duration_since(begin);
        if away >= LONG_AWAY {
            self.full_until = now + REST * away.min(LONGEST);
        }
    }

    /// The thread spins no longer.
    pub(crate) fn rest(&mut self) {
        if std::mem::take(&mut self.spins) {
            self.crowd.spinning.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.rest();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const SPIN: Duration = Duration::from_micros(300);

    #[test]
    fn no_more_spin_at_once_than_are_allowed() {
        static SOME: Crowd = Crowd::new();
        let spinner = || Spinner::among(&SOME, 2, Instant::now());
        let (mut a, mut b, mut c) = (spinner(), spinner(), spinner());
        let now = Instant::now();
        assert!(a.may_spin(now) && b.may_spin(now) && a.may_spin(now));
        assert!(!c.may_spin(now));
        a.rest();
        a.rest();
        assert!(c.may_spin(now) && !a.may_spin(now));
        drop(b);
        assert!(a.may_spin(now));
        drop((a, c));
        assert_eq!(SOME.spinning.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn nobody_spins_where_others_are_woken_all_the_time() {
        static SOME: Crowd = Crowd::new();
        let start = Instant::now();
        let at = |micros| start + Duration::from_micros(micros);
        let mut all: Vec<Spinner> = (0..8).map(|_| Spinner::among(&SOME, 2, start)).collect();
        let (one, others) = all.split_first_mut().unwrap();
        // Alone, whenever it is woken.
        for round in 1..4 {
            one.wake(at(round * 100), SPIN);
            assert!(one.may_spin(at(round * 100)));
        }
        // Two others meanwhile are as many as are allowed, a third is not.
        others.iter_mut().take(2).for_each(|other| other.wake(at(400), SPIN));
        assert!(one.may_spin(at(400)));
        others.last_mut().unwrap().wake(at(400), SPIN);
        assert!(!one.may_spin(at(400)) && !one.spins);
        // All of them within each 500 us: four in the time of a spin.
        for round in 1..4 {
            let now = at(400 + round * 500);
            others.iter_mut().for_each(|other| other.wake(now, SPIN));
            one.wake(now, SPIN);
            assert!(!one.may_spin(now));
        }
        // It is alone again.
        one.wake(at(10_000), SPIN);
        assert!(one.may_spin(at(10_000)));
        drop(all);
        assert_eq!(SOME.spinning.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_thread_that_gave_its_processor_away_for_long_does_not_spin_for_a_while() {
        static ONE: Crowd = Crowd::new();
        let start = Instant::now();
        let at = |micros| start + Duration::from_micros(micros);
        let mut spinner = Spinner::among(&ONE, 1, start);
        spinner.wake(at(100), SPIN);
        assert!(spinner.may_spin(at(100)));
        spinner.is_back(at(100), at(599));
        assert!(spinner.may_spin(at(599)), "a moment");
        spinner.is_back(at(1000), at(3000));
        assert!(!spinner.may_spin(at(3000)) && !spinner.may_spin(at(3000 + 8 * 2000 - 1)) && !spinner.spins);
        assert!(spinner.may_spin(at(3000 + 8 * 2000)));
        spinner.is_back(at(100_000), at(3_600_000_000));
        assert!(spinner.may_spin(at(3_600_000_000 + 400_000)), "an hour of a stopped process");
        drop(spinner);
        assert_eq!(ONE.spinning.load(Ordering::Relaxed), 0);
    }
}

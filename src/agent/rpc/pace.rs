//! How fast bytes come from a peer: whether the loop spins for the next ones.
//!
//! Where a link brings a packet every 50 us, a thread that spins for the next news after each never sleeps, and takes a
//! processor from engines that compute for as long as the transfer lasts, though its end is milliseconds away. So the loop
//! spins only where bytes come fast.

use std::time::{Duration, Instant};

/// Over how long the rate is measured, at least. What is over sooner is worth spinning for, however few bytes it has.
const WINDOW: Duration = Duration::from_millis(2);
/// Bytes a millisecond that are worth spinning for: what two processes of one host exchange in a tenth of that time, and links
/// of up to 2 Gbit/s do not carry.
const FAST: u64 = 256 << 10;

/// In which at least one chunk has come where they come fast.
const SILENCE: Duration = Duration::from_millis(8);

/// The pace of the replies over one connection.
#[derive(Debug)]
pub(crate) struct Pace {
    since: Instant,
    /// Moved since then.
    bytes: u64,
    /// Whether the rate was measured since there was something to move.
    measured: bool,
    /// Bytes a millisecond; `FAST` where it is not known.
    rate: u64,
}

impl Pace {
    pub(crate) fn new(now: Instant) -> Self {
        Pace { since: now, bytes: 0, measured: false, rate: FAST }
    }

    /// There are replies to come again.
    pub(crate) fn begin(&mut self, now: Instant) {
        if !std::mem::take(&mut self.measured) {
            self.rate = FAST;
        }
        (self.since, self.bytes) = (now, 0);
    }

    /// So many more have moved.
    pub(crate) fn moved(&mut self, bytes: u64, now: Instant) {
        self.bytes = self.bytes.saturating_add(bytes);
        let passed = now.saturating_duration_since(self.since);
        if passed >= WINDOW {
            let rate = u128::from(self.bytes) * Duration::from_millis(1).as_nanos() / passed.as_nanos();
            self.rate = u64::try_from(rate).unwrap_or(u64::MAX);
            (self.since, self.bytes, self.measured) = (now, 0, true);
        }
    }

    /// Whether it is worth more to spin for the next bytes than to let others have the processor.
    pub(crate) fn is_fast(&self, now: Instant) -> bool {
        self.rate >= FAST && now.saturating_duration_since(self.since) < SILENCE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_fast_until_they_have_been_slow_for_a_while() {
        let begin = Instant::now();
        let at = |micros| begin + Duration::from_micros(micros);
        let mut pace = Pace::new(begin);
        pace.moved(1000, at(1500));
        assert!(pace.is_fast(at(1500)));
        // 20 MB/s: a packet of 1,000 bytes every 50 us.
        for packet in 31..=80 {
            pace.moved(1000, at(packet * 50));
        }
        assert!(!pace.is_fast(at(4000)));
        // 1 GB/s.
        for piece in 1..=40 {
            pace.moved(100_000, at(4000 + piece * 100));
        }
        assert!(pace.is_fast(at(8000)));
        // Nothing comes any more.
        assert!(!pace.is_fast(at(16_000)));
    }

    #[test]
    fn time_in_which_nothing_was_to_move_does_not_count() {
        let begin = Instant::now();
        let mut pace = Pace::new(begin);
        let later = begin + Duration::from_secs(5);
        pace.begin(later);
        pace.moved(4 * FAST, later + Duration::from_millis(3));
        assert!(pace.is_fast(later));
        // No time at all passes.
        pace.begin(later);
        pace.moved(1, later);
        assert!(pace.is_fast(later));
    }

    #[test]
    fn what_was_slow_is_slow_from_the_beginning_until_something_is_over_soon() {
        let begin = Instant::now();
        let at = |millis| begin + Duration::from_millis(millis);
        let mut pace = Pace::new(begin);
        pace.moved(1000, at(10));
        assert!(!pace.is_fast(at(10)));
        for next in [20, 30] {
            pace.begin(at(next));
            assert!(!pace.is_fast(at(next)));
            pace.moved(1000, at(next + 5));
        }
        pace.begin(at(40));
        pace.moved(1000, at(41));
        assert!(!pace.is_fast(at(41)));
        pace.begin(at(50));
        assert!(pace.is_fast(at(50)));
    }
}

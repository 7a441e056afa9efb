//! How fast a stream moves bytes: whether the loop spins for its next ones.
//!
//! Where a link brings a packet every 50 us, a thread that spins for the next news after each never sleeps, and takes a
//! processor from engines that compute for as long as the transfer lasts, though its end is milliseconds away. So the loop
//! spins for fast streams only, and is woken for a slow one when a millisecond's worth of bytes is there.

use std::time::{Duration, Instant};

/// Over how long the rate is measured, at least.
const WINDOW: Duration = Duration::from_millis(1);
/// Bytes in that time of a stream that is worth spinning for: what two processes of one host exchange in a tenth of it, and
/// links of up to 2 Gbit/s do not carry.
const FAST: u64 = 256 << 10;

/// The pace of one stream in one direction.
#[derive(Debug)]
pub(super) struct Pace {
    since: Instant,
    /// Moved since then.
    bytes: u64,
    /// In a millisecond; `FAST` until it is known.
    rate: u64,
}

impl Pace {
    pub(super) fn new(now: Instant) -> Self {
        Pace { since: now, bytes: 0, rate: FAST }
    }

    /// There is something to move again.
    pub(super) fn begin(&mut self, now: Instant) {
        (self.since, self.bytes) = (now, 0);
    }

    /// The stream has moved `bytes`.
    pub(super) fn moved(&mut self, bytes: u64, now: Instant) {
        self.bytes = self.bytes.saturating_add(bytes);
        let passed = now.saturating_duration_since(self.since);
        if passed >= WINDOW {
            let rate = u128::from(self.bytes) * WINDOW.as_nanos() / passed.as_nanos();
            self.rate = u64::try_from(rate).unwrap_or(u64::MAX);
            self.begin(now);
        }
    }

    /// Whether it is worth more to spin for its next bytes than to let others have the processor.
    pub(super) fn is_fast(&self) -> bool {
        self.rate >= FAST
    }

    /// How many bytes are worth being woken for.
    pub(super) fn worth_waking(&self) -> u64 {
        if self.is_fast() { 1 } else { self.rate.max(1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_fast_until_it_has_been_slow_for_a_millisecond() {
        let begin = Instant::now();
        let at = |micros| begin + Duration::from_micros(micros);
        let mut pace = Pace::new(begin);
        pace.moved(1000, at(500));
        assert!(pace.is_fast());
        assert_eq!(pace.worth_waking(), 1);
        // 20 MB/s: a packet of 1,000 bytes every 50 us.
        for packet in 11..=30 {
            pace.moved(1000, at(packet * 50));
        }
        assert!(!pace.is_fast());
        assert!((10_000..=20_000).contains(&pace.worth_waking()), "{pace:?}");
        // 1 GB/s.
        for piece in 1..=20 {
            pace.moved(100_000, at(1500 + piece * 100));
        }
        assert!(pace.is_fast());
        assert_eq!(pace.worth_waking(), 1);
    }

    #[test]
    fn time_in_which_nothing_was_to_move_does_not_count() {
        let begin = Instant::now();
        let mut pace = Pace::new(begin);
        let later = begin + Duration::from_secs(5);
        pace.begin(later);
        pace.moved(2 * FAST, later + Duration::from_millis(1));
        assert!(pace.is_fast());
        // No time at all passes.
        pace.begin(later);
        pace.moved(1, later);
        assert!(pace.is_fast());
    }
}

//! Log lines that others can cause are limited in rate, so that nobody fills a disk from outside.

use std::time::{Duration, Instant};

/// Passes the first of a kind of line, and then one in each period.
#[derive(Debug, Default)]
pub(crate) struct LogLimit {
    last: Option<Instant>,
    left_out: u64,
}

/// Time from a line that is passed to the next.
const PERIOD: Duration = Duration::from_secs(10);

impl LogLimit {
    /// Returns `None` if no line may be written now, else how many were left out since the last one.
    pub(crate) fn pass(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) < PERIOD) {
            self.left_out = self.left_out.saturating_add(1);
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_in_each_period_says_how_many_were_left_out() {
        let (mut limit, begin) = (LogLimit::default(), Instant::now());
        assert_eq!(limit.pass(begin), Some(0));
        assert_eq!(limit.pass(begin), None);
        assert_eq!(limit.pass(begin + PERIOD / 2), None);
        assert_eq!(limit.pass(begin + PERIOD), Some(2));
        assert_eq!(limit.pass(begin + PERIOD), None);
    }
}

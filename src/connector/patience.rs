//! When what was only counted is reported.

use std::time::{Duration, Instant};

/// How long counts wait for a report that tells of a request's end, before they are a report of their own. Each report
/// wakes whoever waits for one and makes the next poll cost more, and nobody waits for counts: a grant and its renewal
/// as reports of their own made the hand-over of a small request 2 to 3 % slower.
const COUNTS_WAIT: Duration = Duration::from_secs(1);

/// Counts that wait for company.
#[derive(Debug, Default)]
pub(super) struct Patience {
    due: Option<Instant>,
}

impl Patience {
    /// Whether to report now: at once what is `urgent`, and what is only `counted` when it has waited long enough.
    pub(super) fn is_over(&mut self, urgent: bool, counted: bool, now: Instant) -> bool {
        if !urgent && !counted {
            return false;
        }
        // Without a due time after it, the clock is at its end: nothing is to be waited for then.
        let due = *self.due.get_or_insert_with(|| now.checked_add(COUNTS_WAIT).unwrap_or(now));
        let over = urgent || due <= now;
        if over {
            self.due = None;
        }
        over
    }

    /// When to ask again at the latest.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_wait_from_the_first_one_on_and_go_with_what_is_urgent() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut patience = Patience::default();
        assert!(!patience.is_over(false, false, at(0)) && patience.due().is_none(), "nothing to report");
        assert!(!patience.is_over(false, true, at(10)));
        assert!(!patience.is_over(false, true, at(900)), "later counts do not put it off");
        assert_eq!(patience.due(), Some(at(1010)));
        assert!(patience.is_over(false, true, at(1010)));
        assert_eq!(patience.due(), None);
        assert!(!patience.is_over(false, true, at(1020)), "the next ones wait anew");
        assert!(patience.is_over(true, true, at(1030)));
        assert_eq!(patience.due(), None, "they went with it");
        assert!(patience.is_over(true, false, at(1040)));
    }
}

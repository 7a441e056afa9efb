//! Time as a parameter: microseconds since an origin that the driver chose.

use std::ops::Add;
use std::time::Duration;

/// A point in time of one process, in microseconds since an arbitrary origin. Points of two processes do not compare:
/// lifetimes travel between processes as remaining durations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(pub u64);

impl Time {
    /// How long after `earlier` this is; zero if it is not after it.
    pub fn since(self, earlier: Time) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Time {
    type Output = Time;

    /// Saturates at the end of time rather than wrapping.
    fn add(self, d: Duration) -> Time {
        Time(self.0.saturating_add(u64::try_from(d.as_micros()).unwrap_or(u64::MAX)))
    }
}

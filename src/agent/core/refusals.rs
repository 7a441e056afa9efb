//! Devices for which the driver has refused what copies take.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// For how long a refusal counts: to ask takes time, and may wait for the device.
const COUNTS_FOR: Duration = Duration::from_secs(1);

/// The refusals by device, and until when each counts.
#[derive(Default)]
pub(crate) struct Refusals(BTreeMap<u32, (Instant, Error)>);

impl Refusals {
    /// Makes something for a device, unless that was refused a short time ago.
    ///
    /// # Errors
    /// Those of `make`, now or then.
    pub(crate) fn make<T>(&mut self, device: u32, now: Instant, make: impl FnOnce() -> Result<T>) -> Result<T> {
        if let Some((until, error)) = self.0.get(&device)
            && now < *until
        {
            return Err(error.clone());
        }
        let made = make();
        match &made {
            Ok(_) => drop(self.0.remove(&device)),
            // It may have taken a while.
            Err(error) => drop(self.0.insert(device, (now.max(Instant::now()) + COUNTS_FOR, error.clone()))),
        }
        made
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn refusal_counts_for_a_second() {
        let refuse = |text: &str| Err::<(), _>(Error::new(ErrorKind::Cuda, text));
        let mut refusals = Refusals::default();
        let now = Instant::now();
        assert_eq!(refusals.make(0, now, || refuse("first")).unwrap_err().message(), "first");
        assert_eq!(refusals.make(0, now, || Ok(())).unwrap_err().message(), "first");
        refusals.make(1, now, || Ok(())).unwrap();
        let later = Instant::now() + COUNTS_FOR;
        assert_eq!(refusals.make(0, later, || refuse("second")).unwrap_err().message(), "second");
        assert_eq!(refusals.make(0, later, || Ok(())).unwrap_err().message(), "second");
        refusals.make(0, Instant::now() + 2 * COUNTS_FOR, || Ok(())).unwrap();
        refusals.make(0, now, || Ok(())).unwrap();
    }
}

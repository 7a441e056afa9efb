//! Which message numbers have come, so that none counts twice though they may come in any order.

use crate::error::{Error, Result};

/// How far a message may lag behind the newest one. UCX reorders what is under way at a time, which is far less.
const BITS: u64 = 1 << 16;
const WORD: u64 = 64;

/// The last [`BITS`] message numbers as a ring of bits, 8 KiB, allocated with the first message.
#[derive(Debug, Default)]
pub(super) struct ReplayWindow {
    /// One more than the highest number that has come.
    next: u64,
    words: Vec<u64>,
}

impl ReplayWindow {
    /// Refuses a number that has come before, or is too old to tell.
    pub(super) fn check(&self, number: u64) -> Result<()> {
        if number >= self.next {
            return Ok(());
        }
        if self.next - number > BITS {
            return Err(Error::corrupt(format!("message {number} is too old, {} came already", self.next - 1)));
        }
        let (word, bit) = place(number);
        if self.words.get(word).is_some_and(|word| word & bit != 0) {
            return Err(Error::corrupt(format!("message {number} came twice")));
        }
        Ok(())
    }

    /// Notes a number that [`ReplayWindow::check`] let pass.
    pub(super) fn mark(&mut self, number: u64) {
        self.words.resize((BITS / WORD) as usize, 0);
        if number >= self.next {
            // The places of the numbers in between held numbers that are too old now.
            if number - self.next >= BITS {
                self.words.fill(0);
            } else {
                (self.next..number).for_each(|skipped| self.set(skipped, false));
            }
            self.next = number.saturating_add(1);
        }
        self.set(number, true);
    }

    fn set(&mut self, number: u64, value: bool) {
        let (word, bit) = place(number);
        if let Some(word) = self.words.get_mut(word) {
            *word = if value { *word | bit } else { *word & !bit };
        }
    }
}

fn place(number: u64) -> (usize, u64) {
    ((number % BITS / WORD) as usize, 1 << (number % WORD))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn any_order_is_taken_once() {
        let mut window = ReplayWindow::default();
        for number in [5, 0, 3, 1, 2, 4, 63, 64, 65, BITS - 1] {
            assert!(window.check(number).is_ok(), "{number}");
            window.mark(number);
            assert!(window.check(number).is_err(), "{number}");
        }
        assert!(window.check(6).is_ok());
    }

    #[test]
    fn what_is_too_old_is_refused_and_its_place_used_again() {
        let mut window = ReplayWindow::default();
        window.mark(0);
        window.mark(BITS);
        assert!(window.check(0).is_err() && window.check(1).is_ok());
        window.mark(10 * BITS + 7);
        assert!(window.check(9 * BITS + 7).is_err());
        assert!(window.check(9 * BITS + 8).is_ok());
        window.mark(9 * BITS + 8);
        assert!(window.check(9 * BITS + 8).is_err());
    }

    #[test]
    fn it_agrees_with_a_set() {
        let (mut window, mut set, mut random) = (ReplayWindow::default(), BTreeSet::new(), 7u64);
        let mut at = 0u64;
        for _ in 0..200_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            at += (random >> 60) * u64::from(random >> 40 & 1023 == 0) * 5000 + (random >> 63);
            let number = at.saturating_sub(random >> 33 & 0xffff);
            let highest = set.last().copied().unwrap_or(0);
            let fresh = !set.contains(&number) && (number > highest || highest - number < BITS);
            assert_eq!(window.check(number).is_ok(), fresh, "{number}, highest {highest}");
            if fresh {
                window.mark(number);
                set.insert(number);
            }
        }
    }
}

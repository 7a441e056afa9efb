//! Deadlines in a heap, and a memory that forgets by age and number.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::Hash;
use std::time::Duration;

use crate::latest::Latest;
use crate::time::Time;

/// One deadline per key. Moving a deadline to later, the usual case (a lease renewed), costs no heap operation: the
/// heap's entry is corrected when it comes up. Entries of cancelled and earlier deadlines are dropped when they come up.
#[derive(Debug)]
pub(super) struct Deadlines<K> {
    heap: BinaryHeap<Reverse<(Time, K)>>,
    live: HashMap<K, QueuedDeadline>,
}

#[derive(Debug, Clone, Copy)]
struct QueuedDeadline {
    due: Time,
    /// The time of this key's entry in the heap, never after `due`.
    queued: Time,
}

impl<K: Ord + Hash + Clone> Deadlines<K> {
    pub(super) fn new() -> Self {
        Deadlines { heap: BinaryHeap::new(), live: HashMap::new() }
    }

    /// Sets or moves a key's deadline.
    pub(super) fn set(&mut self, key: K, due: Time) {
        if let Some(slot) = self.live.get_mut(&key)
            && slot.queued <= due
        {
            slot.due = due;
            return;
        }
        self.live.insert(key.clone(), QueuedDeadline { due, queued: due });
        self.heap.push(Reverse((due, key)));
        // Stale entries must not outgrow the live ones when deadlines are set and cancelled in quick succession.
        if self.heap.len() > 64 + 2 * self.live.len() {
            self.heap = self.live.iter().map(|(key, slot)| Reverse((slot.queued, key.clone()))).collect();
        }
    }

    /// The key's deadline.
    pub(super) fn get(&self, key: &K) -> Option<Time> {
        self.live.get(key).map(|slot| slot.due)
    }

    /// Forgets a key's deadline.
    pub(super) fn cancel(&mut self, key: &K) {
        self.live.remove(key);
    }

    /// The earliest deadline.
    pub(super) fn next(&mut self) -> Option<Time> {
        while let Some(Reverse((at, key))) = self.heap.peek() {
            match self.live.get_mut(key) {
                Some(slot) if slot.queued == *at && slot.due == *at => return Some(*at),
                Some(slot) if slot.queued == *at => {
                    slot.queued = slot.due;
                    let entry = Reverse((slot.due, key.clone()));
                    self.heap.pop();
                    self.heap.push(entry);
                }
                _ => {
                    self.heap.pop();
                }
            }
        }
        None
    }

    /// Takes a key whose deadline has come.
    pub(super) fn expired(&mut self, now: Time) -> Option<K> {
        if self.next()? > now {
            return None;
        }
        let Reverse((_, key)) = self.heap.pop()?;
        self.live.remove(&key);
        Some(key)
    }

    #[cfg(test)]
    pub(super) fn heap_len(&self) -> usize {
        self.heap.len()
    }
}

/// Remembers values for a fixed time, and at most a fixed number of them: the oldest go first.
#[derive(Debug)]
pub(super) struct Memory<K, V> {
    /// With when they are forgotten.
    latest: Latest<K, (Time, V)>,
    keep: Duration,
}

impl<K: Hash + Eq + Clone, V> Memory<K, V> {
    pub(super) fn new(keep: Duration, most: usize) -> Self {
        Memory { latest: Latest::new(most), keep }
    }

    pub(super) fn len(&self) -> usize {
        self.latest.len()
    }

    pub(super) fn get(&self, key: &K) -> Option<&V> {
        self.latest.get(key).map(|(_, value)| value)
    }

    /// Remembers `value` from `now` on, in place of an earlier one.
    pub(super) fn insert(&mut self, now: Time, key: K, value: V) {
        self.latest.insert(key, (now + self.keep, value));
    }

    pub(super) fn remove(&mut self, key: &K) {
        self.latest.remove(key);
    }

    /// Forgets what is too old.
    pub(super) fn advance(&mut self, now: Time) {
        while self.next_due().is_some_and(|due| due <= now) {
            self.latest.remove_oldest();
        }
    }

    /// When `advance` has something to forget.
    pub(super) fn next_due(&self) -> Option<Time> {
        self.latest.oldest().map(|(due, _)| *due)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn deadlines_come_in_order_and_move_both_ways() {
        let mut d = Deadlines::new();
        d.set("a", Time(10));
        d.set("b", Time(20));
        d.set("c", Time(30));
        d.set("a", Time(25));
        d.set("c", Time(5));
        d.cancel(&"b");
        assert_eq!(d.next(), Some(Time(5)));
        assert_eq!(d.expired(Time(4)), None);
        assert_eq!(d.expired(Time(24)), Some("c"));
        assert_eq!(d.expired(Time(24)), None);
        assert_eq!(d.next(), Some(Time(25)));
        assert_eq!(d.expired(Time(25)), Some("a"));
        assert_eq!(d.next(), None);
    }

    #[test]
    fn a_key_set_again_after_cancelling_has_only_its_new_deadline() {
        let mut d = Deadlines::new();
        d.set(1, Time(10));
        d.cancel(&1);
        d.set(1, Time(20));
        assert_eq!(d.expired(Time(15)), None);
        assert_eq!(d.expired(Time(20)), Some(1));
        assert_eq!(d.expired(Time(100)), None);
    }

    #[test]
    fn renewals_and_cancellations_do_not_grow_the_heap() {
        let mut d = Deadlines::new();
        for t in 0..10_000u64 {
            d.set(1, Time(t + 100));
            d.set(t + 10, Time(1_000_000));
            d.cancel(&(t + 10));
            d.set(2, Time(1_000_000 - t));
            assert!(d.heap_len() <= 70, "{} entries for at most 3 keys", d.heap_len());
        }
    }

    #[test]
    fn memory_forgets_by_age_and_by_number() {
        let mut m = Memory::new(Duration::from_micros(100), 3);
        for k in 0..5 {
            m.insert(Time(k), k, k * 10);
        }
        assert_eq!((m.len(), m.get(&1), m.get(&4)), (3, None, Some(&40)));
        m.insert(Time(50), 2, 99);
        assert_eq!((m.len(), m.get(&2)), (3, Some(&99)));
        m.advance(Time(103));
        assert_eq!((m.get(&3), m.get(&4), m.get(&2)), (None, Some(&40), Some(&99)));
        assert_eq!(m.next_due(), Some(Time(104)));
        m.advance(Time(150));
        assert_eq!((m.len(), m.next_due()), (0, None));
    }
}

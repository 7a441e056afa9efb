//! A map that remembers so many entries at most.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

/// The entries that were added last; the oldest make room. To add or remove one takes constant time.
#[derive(Debug, Clone)]
pub struct Latest<K, V> {
    map: HashMap<K, (u64, V)>,
    /// From the oldest on, with entries among them that are removed or were added again. The first one is neither.
    order: VecDeque<(u64, K)>,
    next: u64,
    most: usize,
}

impl<K: Hash + Eq + Clone, V> Latest<K, V> {
    /// An empty map that holds `most` entries at most.
    pub fn new(most: usize) -> Self {
        Latest { map: HashMap::new(), order: VecDeque::new(), next: 0, most }
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Tells whether there are none.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Tells whether there is an entry with this key.
    pub fn contains_key(&self, key: &K) -> bool {
        self.map.contains_key(key)
    }

    pub(crate) fn get(&self, key: &K) -> Option<&V> {
        self.map.get(key).map(|(_, value)| value)
    }

    /// The value of a key, to be changed in its place.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.map.get_mut(key).map(|(_, value)| value)
    }

    /// Adds an entry as the newest, in place of an earlier one with this key.
    pub fn insert(&mut self, key: K, value: V) {
        self.next = self.next.wrapping_add(1);
        self.map.insert(key.clone(), (self.next, value));
        self.order.push_back((self.next, key));
        self.trim();
        while self.map.len() > self.most {
            self.remove_oldest();
        }
    }

    /// Takes an entry out.
    pub fn remove(&mut self, key: &K) -> Option<V> {
        let (_, value) = self.map.remove(key)?;
        self.trim();
        Some(value)
    }

    pub(crate) fn oldest(&self) -> Option<&V> {
        self.order.front().and_then(|(_, key)| self.get(key))
    }

    pub(crate) fn remove_oldest(&mut self) {
        if let Some((_, key)) = self.order.pop_front() {
            self.remove(&key);
        }
    }

    /// Drops the oldest that are not entries any more, and all of these when they outnumber the entries.
    fn trim(&mut self) {
        let map = &self.map;
        let is_entry = |number: u64, key: &K| map.get(key).is_some_and(|(n, _)| *n == number);
        while self.order.front().is_some_and(|(number, key)| !is_entry(*number, key)) {
            self.order.pop_front();
        }
        if self.order.len() > 64 + 2 * map.len() {
            self.order.retain(|(number, key)| is_entry(*number, key));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_make_room_and_what_is_added_again_is_new() {
        let mut latest = Latest::new(3);
        for k in 0..5 {
            latest.insert(k, k * 10);
        }
        assert_eq!((latest.len(), latest.get(&1), latest.get(&4), latest.oldest()), (3, None, Some(&40), Some(&20)));
        latest.insert(2, 99);
        assert_eq!((latest.len(), latest.get(&2), latest.oldest()), (3, Some(&99), Some(&30)));
        latest.insert(5, 50);
        assert!(!latest.contains_key(&3) && latest.contains_key(&2));
        assert_eq!((latest.remove(&4), latest.remove(&4), latest.oldest()), (Some(40), None, Some(&99)));
        latest.remove_oldest();
        latest.remove_oldest();
        latest.remove_oldest();
        assert_eq!((latest.len(), latest.oldest()), (0, None));
        let mut none = Latest::new(0);
        none.insert(1, 1);
        assert_eq!((none.len(), none.order.len()), (0, 0));
    }

    #[test]
    fn what_is_no_entry_any_more_does_not_pile_up() {
        let mut latest = Latest::new(1000);
        for _ in 0..1000 {
            latest.insert(7, 1);
            latest.remove(&7);
        }
        assert_eq!((latest.len(), latest.order.len()), (0, 0));
        for k in 0..4000 {
            latest.insert(k % 100, k);
            assert!(latest.order.len() <= 64 + 2 * latest.len(), "{} of {}", latest.order.len(), latest.len());
        }
        assert_eq!(latest.len(), 100);
    }
}

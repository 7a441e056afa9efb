//! Traffic of peers that are not connected any more.

use std::collections::{BTreeMap, VecDeque};

use crate::agent::core::ids::PeerId;
use crate::agent::core::stats::Traffic;

/// Names that are kept, and connections whose last transfers may still end.
const KEPT: usize = 256;

/// By the peers' names. What is kept of a name only grows, as counters must, until all of it is forgotten.
#[derive(Default)]
pub(super) struct Departed {
    by_name: BTreeMap<String, Traffic>,
    /// The names, the one that departed last at the end.
    order: VecDeque<String>,
    /// The connections that ended last.
    connections: VecDeque<(PeerId, String)>,
}

impl Departed {
    /// A connection is over. `is_connected` tells which names others still have: what is kept of those is not forgotten.
    pub(super) fn add(&mut self, id: PeerId, name: &str, traffic: &Traffic, is_connected: impl Fn(&str) -> bool) {
        self.connections.push_back((id, name.to_owned()));
        self.connections.drain(..self.connections.len().saturating_sub(KEPT));
        self.forget(is_connected);
        if *traffic == Traffic::default() && !self.by_name.contains_key(name) {
            return;
        }
        self.by_name.entry(name.to_owned()).or_default().merge(traffic);
        self.order.retain(|other| other != name);
        self.order.push_back(name.to_owned());
    }

    /// Makes room for a name: forgets those that are gone for longest.
    fn forget(&mut self, is_connected: impl Fn(&str) -> bool) {
        while self.order.len() >= KEPT
            && let Some(at) = self.order.iter().position(|name| !is_connected(name))
            && let Some(oldest) = self.order.remove(at)
        {
            self.by_name.remove(&oldest);
        }
    }

    /// The traffic of a connection that ended lately: its transfers end after it.
    pub(super) fn traffic(&mut self, id: PeerId) -> Option<&mut Traffic> {
        let (_, name) = self.connections.iter().rev().find(|(gone, _)| *gone == id)?;
        if !self.by_name.contains_key(name) {
            self.order.push_back(name.clone());
        }
        Some(self.by_name.entry(name.clone()).or_default())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &Traffic)> {
        self.by_name.iter().map(|(name, traffic)| (name.as_str(), traffic))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::agent::core::event::Direction;

    fn bytes(departed: &Departed, name: &str) -> Option<u64> {
        departed.iter().find(|(other, _)| *other == name).map(|(_, traffic)| traffic.bytes_read)
    }

    #[test]
    fn counters_grow_and_the_oldest_name_goes() {
        let mut departed = Departed::default();
        let ten = Traffic::of(Direction::Read, 10, true);
        let id = |n: usize| PeerId::from_raw(n as u64);
        for round in 0..2 * KEPT {
            departed.add(id(round), "b", &ten, |_| false);
            assert_eq!(bytes(&departed, "b"), Some(10 * (round as u64 + 1)));
        }
        // Connections that moved nothing take no place, and their transfers that end later are counted.
        for round in 0..2 * KEPT {
            departed.add(id(1000 + round), &format!("silent {round}"), &Traffic::default(), |_| false);
        }
        assert_eq!(departed.iter().count(), 1);
        let last = id(1000 + 2 * KEPT - 1);
        departed.traffic(last).unwrap().merge(&ten);
        departed.traffic(last).unwrap().merge(&ten);
        assert_eq!(bytes(&departed, &format!("silent {}", 2 * KEPT - 1)), Some(20));
        assert!(departed.traffic(id(1)).is_none(), "too long ago");
        // However many: each has a transfer that ends after it.
        for round in 0..2 * KEPT {
            departed.add(id(3000 + round), &format!("late {round}"), &Traffic::default(), |name| name == "b");
            departed.traffic(id(3000 + round)).unwrap().merge(&ten);
        }
        assert_eq!((departed.iter().count(), departed.order.len()), (KEPT, KEPT));
        // One that is connected again stays, and with it what it moved before.
        for round in 0..2 * KEPT {
            departed.add(id(5000 + round), &format!("other {round}"), &ten, |name| name == "b");
        }
        assert_eq!((departed.iter().count(), bytes(&departed, "b")), (KEPT, Some(20 * KEPT as u64)));
    }
}

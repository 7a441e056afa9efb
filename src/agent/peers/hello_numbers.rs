//! Hellos are counted, so that a late one is told from a new one.
//!
//! Connections of one agent to another follow each other over different sockets, so a hello of an earlier connection may arrive
//! after that of a later one. An agent counts the hellos that it sends in its life, and takes one only if its number is above all
//! earlier ones of that sender.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::error::{Error, Result};
use crate::proto::ids::Incarnation;

/// Agents whose last hello's number is remembered after they are gone. Far above the peers at a time, whose numbers are
/// always remembered.
const MAX_REMEMBERED: usize = 65_536;

/// The sender of a hello: an incarnation and a digest of its address. Without a key anybody may claim an incarnation, and
/// must not keep its owner, which has another address, from being heard.
type Sender = (Incarnation, u64);

/// The last hello of this agent, and of every agent that sent one.
#[derive(Debug, Default)]
pub(super) struct HelloNumbers {
    own: u64,
    numbers: HashMap<Sender, u64>,
    order: VecDeque<Sender>,
}

impl HelloNumbers {
    /// The number of this agent's next hello, from 1 on.
    pub(super) fn draw(&mut self) -> u64 {
        self.own = self.own.saturating_add(1);
        self.own
    }

    /// Refuses a number that is not above all earlier ones of this agent. `connected`: whether one must be remembered.
    ///
    /// # Errors
    /// [`Corrupt`](crate::ErrorKind::Corrupt).
    pub(super) fn take(
        &mut self,
        (agent, address): (Incarnation, &[u8]),
        number: u64,
        connected: impl Fn(Incarnation) -> bool,
    ) -> Result<()> {
        let mut digest = DefaultHasher::new();
        address.hash(&mut digest);
        let sender = (agent, digest.finish());
        match self.numbers.insert(sender, number) {
            Some(last) if last >= number => {
                self.numbers.insert(sender, last);
                return Err(Error::corrupt(format!("hello {number} of agent {agent} came before, or is late")));
            }
            Some(_) => {}
            None => self.order.push_back(sender),
        }
        // Each connected one is passed over at most once.
        for _ in 0..self.order.len() {
            if self.order.len() <= MAX_REMEMBERED {
                break;
            }
            let Some(oldest) = self.order.pop_front() else { break };
            if connected(oldest.0) {
                self.order.push_back(oldest);
            } else {
                self.numbers.remove(&oldest);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    const ADDRESS: &[u8] = b"address";

    #[test]
    fn hello_counts_only_above_the_last() {
        let mut seen = HelloNumbers::default();
        let gone = |_| false;
        let (a, b) = ((Incarnation(1), ADDRESS), (Incarnation(2), ADDRESS));
        seen.take(a, 3, gone).unwrap();
        for late in [3, 2, 0] {
            assert_eq!(seen.take(a, late, gone).unwrap_err().kind(), ErrorKind::Corrupt);
        }
        seen.take(b, 1, gone).unwrap();
        seen.take(a, 4, gone).unwrap();
        assert!(seen.take(a, 3, gone).is_err() && seen.take(b, 1, gone).is_err());
        // A peer that claims another's incarnation has another address.
        seen.take((Incarnation(1), b"elsewhere"), u64::MAX, gone).unwrap();
        seen.take(a, 5, gone).unwrap();
    }

    #[test]
    fn connected_agents_are_never_forgotten() {
        let mut seen = HelloNumbers::default();
        let connected = |agent: Incarnation| agent.0 <= 10;
        for agent in 1..=2 * MAX_REMEMBERED as u64 {
            seen.take((Incarnation(agent), ADDRESS), 7, connected).unwrap();
        }
        assert_eq!((seen.numbers.len(), seen.order.len()), (MAX_REMEMBERED, MAX_REMEMBERED));
        assert!((1..=10).all(|agent| seen.take((Incarnation(agent), ADDRESS), 7, connected).is_err()));
        assert!(seen.take((Incarnation(11), ADDRESS), 7, connected).is_ok());
    }

    #[test]
    fn own_hellos_are_numbered_from_one() {
        let mut own = HelloNumbers::default();
        assert_eq!([own.draw(), own.draw(), own.draw()], [1, 2, 3]);
    }
}

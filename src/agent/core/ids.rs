//! Ids of regions, peers and transfers: 64 bits that are never given twice, so that a stale one is `NotFound`.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};

/// Bits that count; above them 15 bits tell one agent's ids from another's. The top bit stays zero.
const COUNT_BITS: u32 = 48;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub(crate) u64);

        impl $name {
            /// The id as a number, as the C ABI carries it.
            pub fn raw(self) -> u64 {
                self.0
            }

            /// The id of that number; whether it names anything is found out when it is used.
            pub fn from_raw(raw: u64) -> Self {
                $name(raw)
            }

            /// The error for an id that names nothing (any more).
            pub(crate) fn unknown(self) -> Error {
                Error::not_found(format!(
                    "{} {:#x} is not known to this agent: it ended, or belongs to another agent", $what, self.0
                ))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{} {:#x}", $what, self.0)
            }
        }
    };
}

id!(
    /// A registered region of this agent.
    RegionId, "region"
);
id!(
    /// Another agent that this one is connected to. A peer that was lost and connected to again gets a new id.
    PeerId, "peer"
);
id!(
    /// One transfer.
    TransferId, "transfer"
);

impl RegionId {
    /// The region's index in [`AgentMetadata::regions`](crate::proto::wire::AgentMetadata) and in the
    /// [`Segment`](crate::proto::plan::Segment)s of copy plans. Never used for another region in this agent's life.
    pub fn index(self) -> u32 {
        u32::try_from(self.0 & ((1 << COUNT_BITS) - 1)).unwrap_or(u32::MAX)
    }

    /// The id of index `index` under the agent's salt.
    pub(crate) fn of_index(salt: u64, index: u32) -> Self {
        RegionId(salt | u64::from(index))
    }
}

/// Hands out ids. One counter serves peers and transfers, so that an id of one kind is never one of the other.
#[derive(Debug)]
pub(crate) struct IdSource {
    salt: u64,
    next: AtomicU64,
}

/// Region indices live below this count, all other ids above: no id of one kind is one of another.
const FIRST: u64 = 1 << 32;

impl IdSource {
    /// `entropy` is any number that differs between agents, such as the incarnation.
    pub(crate) fn new(entropy: u64) -> Self {
        IdSource { salt: ((entropy & 0x7fff) | 1) << COUNT_BITS, next: AtomicU64::new(FIRST) }
    }

    /// What is common to all ids of this agent.
    pub(crate) fn salt(&self) -> u64 {
        self.salt
    }

    fn next(&self) -> Result<u64> {
        let count = self.next.fetch_add(1, Ordering::Relaxed);
        if count >> COUNT_BITS != 0 {
            return Err(Error::new(crate::ErrorKind::Exhausted, "this agent has used up its 2^48 ids; start another"));
        }
        Ok(self.salt | count)
    }

    pub(crate) fn peer(&self) -> Result<PeerId> {
        self.next().map(PeerId)
    }

    pub(crate) fn transfer(&self) -> Result<TransferId> {
        self.next().map(TransferId)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_unique_and_fit_i64() {
        let (a, b) = (IdSource::new(0xffff_ffff_ffff_fff1), IdSource::new(0x22));
        let region = RegionId::of_index(a.salt(), 7);
        assert_eq!(region.index(), 7);
        let ids = [a.peer().unwrap().raw(), a.transfer().unwrap().raw(), b.peer().unwrap().raw(), region.raw()];
        for (i, id) in ids.iter().enumerate() {
            assert!(i64::try_from(*id).is_ok());
            assert!(ids.iter().skip(i + 1).all(|other| other != id));
        }
    }
}

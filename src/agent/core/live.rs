//! Ids in use, kept by the progress thread so that the handle can refuse stale ones without waiting.

use std::sync::PoisonError;

use super::id_map::{IdMap, IdSet};
use super::ids::{IdSource, PeerId, TransferId};
use crate::sync::{Arc, AtomicU64, Mutex, MutexGuard};

/// The source of ids, and which of them live.
pub(crate) struct Live {
    pub(crate) ids: IdSource,
    table: Mutex<LiveIds>,
}

/// Ids that may be used now.
#[derive(Default)]
pub(crate) struct LiveIds {
    /// With the bytes of messages to each that are not sent yet.
    pub(crate) peers: IdMap<PeerId, Arc<AtomicU64>>,
    /// With the peer and what the owner gave, which their events have.
    pub(crate) transfers: IdMap<TransferId, (PeerId, u64)>,
    /// Those that nobody drives to their end any more: whether they still touch memory is not known.
    pub(crate) lost: IdSet<TransferId>,
    /// Set when the progress thread takes no more commands.
    pub(crate) ended: bool,
}

impl Live {
    /// `entropy` is any number that differs between agents, such as the incarnation.
    pub(crate) fn new(entropy: u64) -> Self {
        Live { ids: IdSource::new(entropy), table: Mutex::default() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, LiveIds> {
        lock(&self.table)
    }
}

/// Takes a short lock. A panic while one was held leaves no half-made state behind.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

//! The actions that the state machine asks of its driver, and its names for sessions, peers and transfers.

use std::fmt;

use crate::ids::{EngineId, Incarnation, RankId, RequestId};
use crate::plan::CopyPlan;
use crate::time::Time;
use crate::wire::{AgentMetadata, PeerMessage};

/// One handshake. Never used twice by one machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// One rank's read for one load. Never used twice by one machine, so that a late completion is nobody's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferToken(pub u64);

/// One wait for a prefill. Never used twice by one machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AwaitId(pub u64);

/// A producer rank that this machine had connected. `connection` differs for every [`Action::Connect`] of one machine,
/// also to the same rank, so that an event of an earlier connection is nobody's.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerKey {
    /// Which connection of this machine.
    pub connection: u64,
    /// The rank's engine.
    pub engine: EngineId,
    /// The life of the rank's agent.
    pub incarnation: Incarnation,
    /// The rank.
    pub rank: RankId,
}

impl fmt::Display for PeerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of engine {}, incarnation {}", self.rank, self.engine, self.incarnation)
    }
}

/// Where a message comes from or goes to.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PeerRef {
    /// A rank that this machine connected to. A driver that knows a sender under both names uses this one: verdicts
    /// count only from here.
    Outbound(PeerKey),
    /// A rank that connected to us, under a number of the driver's that is not reused.
    Inbound(u64),
}

impl fmt::Display for PeerRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PeerRef::Outbound(key) => key.fmt(f),
            PeerRef::Inbound(number) => write!(f, "inbound peer {number}"),
        }
    }
}

/// Figures of a completed transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TransferFigures {
    /// Bytes moved.
    pub bytes: u64,
    /// UCX operations posted.
    pub operations: u64,
    /// When the first operation was posted.
    pub posted_at: Time,
    /// When the last operation was posted.
    pub all_posted_at: Time,
    /// When the last operation completed.
    pub finished_at: Time,
}

/// An action for the driver. Actions are carried out in the order in which they come.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Ask an engine's listener for the metadata of all its ranks, as a query with the session's number; answer with
    /// `handle_handshake`. The machine has its own timeout: an answer that comes later is ignored.
    Handshake {
        /// Echoed in the answer.
        session: SessionId,
        /// The engine that is expected there.
        engine: EngineId,
        /// Host of the engine's listener.
        host: String,
        /// Port of the engine's listener.
        port: u16,
        /// Over a new connection, for which the host's name is looked up again.
        anew: bool,
    },
    /// Await a prefill at its engine's listener; answer with `handle_prefill` once, when it is over or far enough.
    Await {
        /// Echoed in the answer.
        number: AwaitId,
        /// The engine that is expected there.
        engine: EngineId,
        /// Host of the engine's listener.
        host: String,
        /// Port of the engine's listener.
        port: u16,
        /// The prefill's `transfer_id`.
        request: RequestId,
        /// From how many written tokens on it is far enough; 0: when it is over.
        from_tokens: u64,
    },
    /// The answer to this [`Action::Await`] is of no use any more.
    Forget {
        /// As in the `Await`.
        number: AwaitId,
    },
    /// Connect; answer with `handle_connected` or `handle_peer_lost`.
    Connect {
        /// Names the connection from now on.
        peer: PeerKey,
        /// Where and what to connect to.
        metadata: AgentMetadata,
    },
    /// Read by this plan from a connected peer; answer with exactly one `handle_transfer_done`, when no operation of
    /// the transfer can touch memory any more, also after a `Cancel` and after the peer was lost.
    Transfer {
        /// Echoed in the answer.
        token: TransferToken,
        /// Whom to read from.
        peer: PeerKey,
        /// The bytes to read.
        plan: CopyPlan,
    },
    /// End this transfer as soon as it can be. It is still answered as any transfer. Ignore it if the transfer is over.
    Cancel {
        /// The transfer.
        token: TransferToken,
    },
    /// Send. Ignore it if the peer is gone.
    Send {
        /// To whom.
        peer: PeerRef,
        /// What.
        message: PeerMessage,
    },
    /// Nothing uses this peer any more: close the connection after what was sent. Nothing is answered.
    Disconnect {
        /// Whom.
        peer: PeerKey,
    },
}

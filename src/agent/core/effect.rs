//! Requests of one part to the others.
//!
//! A part changes its own state only. What it finds out that concerns others it notes as an effect, which
//! `engine::dispatch` carries out before anything more is posted. So nothing is posted for a peer that is being lost or a
//! transfer that is being stopped, and a transfer is reported only when it has stopped.

use std::collections::VecDeque;
use std::time::Instant;

use super::event::{Direction, Event};
use super::frame::FrameKind;
use super::ids::{PeerId, TransferId};
use super::stats::PathBytes;
use crate::error::{Error, Result};

/// Something that other parts must hear of.
#[derive(Debug)]
pub(crate) enum Effect {
    /// Goes to the agent's owner.
    Tell(Event),
    /// The peer has said hello: its connection can be used.
    PeerReady { peer: PeerId },
    /// The connection is broken, or the peer misbehaves: it is to be given up.
    LosePeer { peer: PeerId, error: Error },
    /// The peer is out of the table: its transfers and requests end. `given_up` where it has neither left nor ended,
    /// nor was disconnected by the agent's owner.
    PeerGone { peer: PeerId, error: Error, given_up: Option<GivenUp> },
    /// A frame without contents goes to a peer.
    Send { peer: PeerId, kind: FrameKind, sequence: u64 },
    /// An operation of a transfer is no longer in flight.
    OperationEnded(OperationEnd),
    /// A transfer's writes need a flush, which counts as one of its operations.
    Flush { transfer: TransferId, peer: PeerId },
    /// Bytes that a transfer has read one-sided must reach the device, likewise.
    FlushDevice { transfer: TransferId },
    /// Nothing more is posted for a transfer: its jobs that no copy thread has begun are to be cancelled.
    TransferStopped { transfer: TransferId },
    /// No operation of a transfer can touch memory any more.
    TransferEnded(TransferEnd),
}

/// A peer on this host that this side gives up. Its process goes on, and with it the copies of this side's memory that it has
/// begun.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GivenUp {
    /// Its process, if it is known and in this process's PID namespace.
    pub(crate) process: Option<u32>,
    /// Whether it may copy this side's host memory by itself.
    pub(crate) is_near: bool,
    /// Whether it is on this host.
    pub(crate) on_this_host: bool,
}

/// How an operation ended.
#[derive(Debug)]
pub(crate) struct OperationEnd {
    pub(crate) transfer: TransferId,
    /// Bytes that it counted in the windows; `None` if it did not.
    pub(crate) windowed: Option<u64>,
    /// Bytes that it has moved, by the path that they took.
    pub(crate) moved: PathBytes,
    pub(crate) result: Result<()>,
}

/// What is to be said of a transfer that is over.
#[derive(Debug)]
pub(crate) struct TransferEnd {
    pub(crate) id: TransferId,
    /// As it was requested.
    pub(crate) user_data: u64,
    /// To be sent to the peer if it succeeded.
    pub(crate) message: Option<Vec<u8>>,
    pub(crate) peer: PeerId,
    pub(crate) direction: Direction,
    pub(crate) result: Result<()>,
    /// Bytes moved.
    pub(crate) bytes: u64,
    /// Operations posted.
    pub(crate) operations: u64,
    /// When the first and the last operation were posted, if any was.
    pub(crate) posted: Option<(Instant, Instant)>,
    /// Regions of the peer's that it used, each once.
    pub(crate) remote_regions: Vec<u32>,
}

/// Effects in the order in which they came about.
#[derive(Debug, Default)]
pub(crate) struct Effects(VecDeque<Effect>);

impl Effects {
    pub(crate) fn push(&mut self, effect: Effect) {
        self.0.push_back(effect);
    }

    pub(crate) fn lose(&mut self, peer: PeerId, error: Error) {
        self.push(Effect::LosePeer { peer, error });
    }

    /// Sends a frame without contents.
    pub(crate) fn send(&mut self, peer: PeerId, kind: FrameKind, sequence: u64) {
        self.push(Effect::Send { peer, kind, sequence });
    }

    /// Takes the oldest effect, and what is behind it: [`Effects::resume`] puts that back behind the effects that carrying
    /// out the first one has, so that what follows from one effect is over before the next.
    pub(crate) fn pop(&mut self) -> Option<(Effect, Effects)> {
        let effect = self.0.pop_front()?;
        Some((effect, std::mem::take(self)))
    }

    /// Puts back what was behind an effect that has been carried out.
    pub(crate) fn resume(&mut self, mut rest: Effects) {
        if self.0.is_empty() {
            *self = rest;
        } else {
            self.0.append(&mut rest.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effects_of_an_effect_come_first() {
        let stopped = |n| Effect::TransferStopped { transfer: TransferId::from_raw(n) };
        let number = |effect: &Effect| match effect {
            Effect::TransferStopped { transfer } => transfer.raw(),
            _ => 0,
        };
        let mut effects = Effects::default();
        effects.push(stopped(1));
        effects.push(stopped(4));
        let mut order = Vec::new();
        while let Some((effect, rest)) = effects.pop() {
            order.push(number(&effect));
            if number(&effect) == 1 {
                effects.push(stopped(2));
                effects.push(stopped(3));
            }
            effects.resume(rest);
        }
        assert_eq!(order, [1, 2, 3, 4]);
    }
}

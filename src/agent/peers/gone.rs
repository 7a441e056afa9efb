//! Which process a lost peer was, so that a dead one is not connected to again.
//!
//! UCX (seen with 1.23) never gives back what an endpoint has opened, a TCP socket for one, when it cannot be made because the
//! peer's process is gone: it refuses the lane that copies that process's memory after it has made the others.

use std::collections::VecDeque;

use crate::error::{Error, ErrorKind, Result};
use crate::proto::ids::Incarnation;
use crate::sys::process::has_ended;

/// Peers that are remembered: the ones that were lost last.
const KEPT: usize = 1024;

/// The processes of peers on this host, in this process's PID namespace.
#[derive(Default)]
pub(super) struct Gone(VecDeque<(Incarnation, u32)>);

impl Gone {
    /// A peer that was process `pid` is not connected any more.
    pub(super) fn note(&mut self, incarnation: Incarnation, pid: u32) {
        self.0.retain(|(known, _)| *known != incarnation);
        self.0.push_back((incarnation, pid));
        self.0.drain(..self.0.len().saturating_sub(KEPT));
    }

    /// Refuses a peer whose process has ended: an incarnation lives in one process.
    ///
    /// # Errors
    /// [`ErrorKind::PeerDied`].
    pub(super) fn check(&self, name: &str, incarnation: Incarnation) -> Result<()> {
        match self.0.iter().find(|(known, _)| *known == incarnation) {
            Some((_, pid)) if has_ended(*pid) => Err(Error::new(
                ErrorKind::PeerDied,
                format!(
                    "agent {name} is gone: its process {pid} on this host has ended; connect by the metadata of a new one"
                ),
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::process::{Command, id};

    use super::*;

    #[test]
    fn a_process_that_has_ended_is_refused_and_one_that_lives_is_not() {
        let mut child = Command::new("true").spawn().unwrap();
        let mut gone = Gone::default();
        gone.note(Incarnation(1), child.id());
        gone.note(Incarnation(2), id());
        child.wait().unwrap();
        assert_eq!(gone.check("a", Incarnation(1)).unwrap_err().kind(), ErrorKind::PeerDied);
        assert!(gone.check("b", Incarnation(2)).is_ok() && gone.check("c", Incarnation(3)).is_ok());
        for other in 0..KEPT as u64 {
            gone.note(Incarnation(10 + other), id());
        }
        assert_eq!(gone.0.len(), KEPT);
        assert!(gone.check("a", Incarnation(1)).is_ok(), "forgotten");
    }
}

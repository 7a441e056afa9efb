//! Remembers dead peers, so that the agent does not connect to them again.
//!
//! UCX (seen with 1.23) leaks what an endpoint has opened, such as a TCP socket, when it cannot make the endpoint
//! because the peer's process is gone: it refuses the lane that copies that process's memory after it has made the
//! others. The process of a peer that was connected is known, and is checked before UCX is asked. For a peer that never
//! answered, only UCX's refusal tells, so it costs those descriptors once.

use std::collections::VecDeque;

use crate::error::{Error, ErrorKind, Result};
use crate::proto::ids::Incarnation;
use crate::sys::ended::has_ended;

/// Peers that are remembered: the ones that were lost last.
const KEPT: usize = 1024;

#[derive(Default)]
pub(super) struct Gone {
    /// The processes of peers on this host, in this process's PID namespace.
    processes: VecDeque<(Incarnation, u32)>,
    /// Addresses whose process UCX has not found. Incarnations would not do: a stranger's hello may name one with
    /// another address.
    addresses: VecDeque<Vec<u8>>,
}

impl Gone {
    /// A peer that was process `pid` is not connected any more.
    pub(super) fn note(&mut self, incarnation: Incarnation, pid: u32) {
        self.processes.retain(|(known, _)| *known != incarnation);
        self.processes.push_back((incarnation, pid));
        self.processes.drain(..self.processes.len().saturating_sub(KEPT));
    }

    /// UCX has refused an address, because it names a process of this host that there is not.
    pub(super) fn note_refused(&mut self, address: &[u8]) {
        self.addresses.push_back(address.to_vec());
        self.addresses.drain(..self.addresses.len().saturating_sub(KEPT));
    }

    /// Refuses a peer whose process has ended: an incarnation lives in one process.
    ///
    /// # Errors
    /// [`ErrorKind::PeerDied`].
    pub(super) fn check(&self, name: &str, incarnation: Incarnation, address: &[u8]) -> Result<()> {
        let process = match self.processes.iter().find(|(known, _)| *known == incarnation) {
            Some((_, pid)) if has_ended(*pid) => format!("process {pid}"),
            _ if self.addresses.iter().any(|refused| refused == address) => "process".to_owned(),
            _ => return Ok(()),
        };
        Err(Error::new(
            ErrorKind::PeerDied,
            format!("agent {name} is gone: its {process} on this host has ended; connect by the metadata of a new one"),
        ))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::process::{Command, id};

    use super::*;

    #[test]
    fn ended_process_is_refused() {
        let mut child = Command::new("true").spawn().unwrap();
        let mut gone = Gone::default();
        gone.note(Incarnation(1), child.id());
        gone.note(Incarnation(2), id());
        child.wait().unwrap();
        let died = |gone: &Gone, incarnation, address: &[u8]| {
            gone.check("a", Incarnation(incarnation), address).is_err_and(|error| error.kind() == ErrorKind::PeerDied)
        };
        assert!(died(&gone, 1, b"x") && !died(&gone, 2, b"x") && !died(&gone, 3, b"x"));
        gone.note_refused(b"x");
        assert!(died(&gone, 3, b"x") && !died(&gone, 3, b"y"));
        for other in 0..KEPT as u64 {
            gone.note(Incarnation(10 + other), id());
            gone.note_refused(&other.to_le_bytes());
        }
        assert_eq!((gone.processes.len(), gone.addresses.len()), (KEPT, KEPT));
        assert!(!died(&gone, 1, b"x"), "forgotten");
    }
}

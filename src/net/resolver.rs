//! Names to addresses without blocking: the name service may take seconds, so threads of their own ask it.

use std::collections::{BTreeSet, VecDeque};
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, ErrorKind, Result};
use crate::sync::Signal;
use crate::sys::thread::spawn;

/// Threads at a time; further names wait for one.
const MAX_THREADS: usize = 8;

/// A name and port, and what the name service says.
pub(super) struct Resolved {
    pub(super) name: (String, u16),
    /// At least one address.
    pub(super) result: Result<Vec<SocketAddr>, String>,
}

#[derive(Default)]
pub(super) struct Resolver {
    /// Made with the first name.
    mailbox: Option<Arc<Mailbox>>,
    /// Being asked. A name that is not answered stays here, with its thread, for as long as the name service takes.
    asking: BTreeSet<(String, u16)>,
    waiting: VecDeque<(String, u16)>,
}

struct Mailbox {
    done: Mutex<Vec<Resolved>>,
    signal: Signal,
}

impl Resolver {
    /// Begins to resolve a name, unless that is under way.
    pub(super) fn ask(&mut self, name: &(String, u16)) -> Result<()> {
        if self.asking.contains(name) || self.waiting.contains(name) {
            return Ok(());
        }
        self.waiting.push_back(name.clone());
        self.start()
    }

    fn start(&mut self) -> Result<()> {
        while self.asking.len() < MAX_THREADS
            && let Some(name) = self.waiting.pop_front()
        {
            let mailbox = match &self.mailbox {
                Some(mailbox) => Arc::clone(mailbox),
                None => {
                    let made = Arc::new(Mailbox { done: Mutex::default(), signal: Signal::new()? });
                    Arc::clone(self.mailbox.insert(made))
                }
            };
            let asked = name.clone();
            spawn("kvf-resolve", move || {
                let result = resolve(&asked);
                mailbox.done.lock().unwrap_or_else(PoisonError::into_inner).push(Resolved { name: asked, result });
                mailbox.signal.raise();
            })
            .map_err(|e| Error::new(ErrorKind::Io, format!("no thread to resolve {:?} with: {e}", name.0)))?;
            self.asking.insert(name);
        }
        Ok(())
    }

    /// Takes the results since the last call. Names that are not `wanted` any more lose their place in the queue, so that
    /// they neither collect there nor keep others waiting.
    pub(super) fn take(&mut self, wanted: impl Fn(&(String, u16)) -> bool) -> Vec<Resolved> {
        self.waiting.retain(wanted);
        let Some(mailbox) = self.mailbox.as_ref().filter(|_| !self.asking.is_empty()) else { return Vec::new() };
        mailbox.signal.clear();
        let done = std::mem::take(&mut *mailbox.done.lock().unwrap_or_else(PoisonError::into_inner));
        for resolved in &done {
            self.asking.remove(&resolved.name);
        }
        if let Err(e) = self.start() {
            log::warn!("kvferry client: {e}");
        }
        done
    }

    /// Readable when something has been resolved.
    pub(super) fn fd(&self) -> Option<RawFd> {
        self.mailbox.as_ref().filter(|_| !self.asking.is_empty()).map(|mailbox| mailbox.signal.fd())
    }
}

fn resolve(name: &(String, u16)) -> Result<Vec<SocketAddr>, String> {
    let mut found: Vec<SocketAddr> = Vec::new();
    for address in (name.0.as_str(), name.1).to_socket_addrs().map_err(|e| e.to_string())? {
        if !found.contains(&address) {
            found.push(address);
        }
    }
    if found.is_empty() { Err("it has no address".to_owned()) } else { Ok(found) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_nobody_waits_for_is_not_asked_for() {
        let name = |n: usize| (format!("host-{n}.invalid"), 1);
        // The name service answers none of these.
        let mut resolver = Resolver { asking: (0..MAX_THREADS).map(name).collect(), ..Resolver::default() };
        for n in 100..1_100 {
            resolver.ask(&name(n)).unwrap();
        }
        assert_eq!(resolver.waiting.len(), 1_000);
        assert!(resolver.take(|wanted| *wanted == name(700)).is_empty());
        assert_eq!(resolver.waiting, [name(700)]);
    }
}

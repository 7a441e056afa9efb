//! kvferry's own files about what threads share, built with loom's types in place of std's, and models that let every
//! order of threads happen. The modules beside them are just enough for the files to be built.
#![cfg(test)]
#![allow(dead_code)]

mod error {
    /// Why the listener gave up.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Error(pub u32);
    pub enum ErrorKind {
        ShutDown,
        Timeout,
    }
    impl Error {
        pub fn new(_: ErrorKind, _: impl Into<String>) -> Error {
            Error(0)
        }
    }
    pub type Result<T> = std::result::Result<T, Error>;
}

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize};
    pub(crate) use loom::sync::{Arc, Condvar, Mutex, MutexGuard, RwLock};

    use crate::error::Result;

    /// An eventfd that counts, and tells whether it is readable.
    #[derive(Debug)]
    pub(crate) struct Signal(Mutex<bool>);

    impl Signal {
        pub(crate) fn new() -> Result<Signal> {
            Ok(Signal(Mutex::new(false)))
        }

        pub(crate) fn raise(&self) {
            *self.0.lock().unwrap() = true;
        }

        pub(crate) fn clear(&self) {
            *self.0.lock().unwrap() = false;
        }

        /// 1 when readable.
        pub(crate) fn fd(&self) -> std::os::fd::RawFd {
            (*self.0.lock().unwrap()).into()
        }
    }
}

mod mem {
    pub struct MemoryRange;
}

#[path = "../../src/sys"]
mod sys {
    pub mod isolated;

    use std::sync::atomic::Ordering;

    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU8;

    /// What `src/sys/outbox.rs` keeps in a caller's memory, in a form whose every access loom sees.
    #[derive(Default)]
    pub struct OutboxMemory {
        full: AtomicU8,
        more: AtomicU8,
        report: UnsafeCell<Vec<u8>>,
    }

    impl OutboxMemory {
        /// The reader's side, as C does it.
        pub fn read(&self) -> Option<Vec<u8>> {
            if self.full.load(Ordering::Acquire) == 0 {
                return None;
            }
            // SAFETY: the writer leaves it alone while `full` is set; loom fails if it does not.
            let report = self.report.with(|report| unsafe { (*report).clone() });
            self.full.store(0, Ordering::Release);
            Some(report)
        }

        pub fn overwrite(&self) {
            // SAFETY: loom fails if the writer is not through with it.
            self.report.with_mut(|at| unsafe { *at = Vec::new() });
        }

        pub fn more(&self) -> bool {
            self.more.load(Ordering::Acquire) != 0
        }
    }

    /// The library's side.
    pub struct Outbox(pub Arc<OutboxMemory>);

    // SAFETY: as `src/sys/outbox.rs` says; loom looks for races.
    unsafe impl Send for Outbox {}
    // SAFETY: the same.
    unsafe impl Sync for OutboxMemory {}
    // SAFETY: the same.
    unsafe impl Send for OutboxMemory {}

    impl Outbox {
        pub fn put(&mut self, report: &[u8]) -> bool {
            if self.is_full() {
                return false;
            }
            // SAFETY: the reader leaves it alone while `full` is clear; loom fails if it does not.
            self.0.report.with_mut(|at| unsafe { *at = report.to_vec() });
            self.0.full.store(1, Ordering::Release);
            true
        }

        pub fn is_full(&self) -> bool {
            self.0.full.load(Ordering::Acquire) != 0
        }

        pub fn clear(&mut self) {
            self.0.full.store(0, Ordering::Release);
        }

        pub fn set_more(&self, more: bool) {
            self.0.more.store(more.into(), Ordering::Release);
        }
    }
}

mod proto {
    pub mod stats {
        #[derive(Clone, Debug, Default)]
        pub struct Stats(pub u64);
        impl Stats {
            pub fn merge(&mut self, other: &Stats) {
                self.0 += other.0;
            }
        }
    }
    pub mod wire {
        use super::stats::Stats;
        use crate::error::Result;

        pub trait Message {
            fn to_bytes(&self) -> Result<Vec<u8>>;
        }
        impl Message for WorkerReport {
            fn to_bytes(&self) -> Result<Vec<u8>> {
                Ok(self.finished_recving.iter().map(|&id| id.try_into().unwrap()).collect())
            }
        }

        pub struct AgentMetadata;
        pub struct AgentRegion;
        pub struct RankMetadata;
        #[derive(Debug, Default)]
        pub struct WorkerReport {
            pub rank: u32,
            pub granted: Vec<u32>,
            pub finished_sending: Vec<u32>,
            pub finished_recving: Vec<u32>,
            pub failed_recving: Vec<u32>,
            pub records: Vec<u32>,
            pub stats: Stats,
        }
    }
    pub mod worker {
        #[derive(Clone, Debug)]
        pub struct MachineGauges;
        pub struct WorkerMachine;
    }
}

mod agent;
mod connector;
mod ffi;
mod net;

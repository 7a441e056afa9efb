//! kvferry's own files about what threads share, built with loom's types in place of std's, and models that let every
//! order of threads happen. The modules beside them are just enough for the files to be built.
#![cfg(test)]
#![allow(dead_code)]

mod error {
    /// Why the listener gave up.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Error(pub u32);
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

mod proto {
    pub mod plan {
        pub struct CopyPlan;
    }
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
        pub struct RankMetadata;
        #[derive(Debug, Default)]
        pub struct WorkerReport {
            pub rank: u32,
            pub finished_sending: Vec<u32>,
            pub finished_recving: Vec<u32>,
            pub failed_recving: Vec<u32>,
            pub records: Vec<u32>,
            pub stats: Stats,
        }
    }
    pub mod worker {
        #[derive(Clone, Debug)]
        pub struct Gauges;
        pub struct Worker;
    }
}

mod agent;
mod connector;
mod ffi;
mod net;

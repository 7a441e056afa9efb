//! Regions that are deregistered while processes of this host may read and write them by themselves: host memory by the kernel's
//! copies, device memory by a mapping.
//!
//! Such a copy does not end with the registration, and a mapping keeps freed memory from being free. So the owner **revokes** the
//! region: it asks the peers that may use it to **release** it. Each use of a region is a guard
//! ([`Hold`](super::core::regions::Hold)), and the deregistration ends with the last one. [`holds`] has those of peers that were
//! asked, [`releases`] what this side is to release when its own uses end, [`revoked`] what a peer must know that comes later.

pub(super) mod holds;
pub(super) mod releases;
pub(super) mod revoked;

//! Messages of one connection: put into order as they arrive, bounded as they leave.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, ErrorKind, Result};

/// Messages held back, and their bytes, until an earlier one arrives. UCX reorders only what is under way at a time,
/// so a sender that exceeds this is broken.
const MAX_HELD: usize = 4096;
const MAX_HELD_BYTES: usize = 256 << 20;

/// A message, or the goodbye that ends the connection.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum InboxItem {
    Data(Vec<u8>),
    Goodbye,
}

impl InboxItem {
    fn len(&self) -> usize {
        match self {
            InboxItem::Data(data) => data.len(),
            InboxItem::Goodbye => 0,
        }
    }
}

/// Puts a connection's messages back into the order in which they were sent.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    next: u64,
    held: BTreeMap<u64, InboxItem>,
    held_bytes: usize,
}

impl Inbox {
    /// Bytes of the messages that are held back.
    pub(crate) fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Takes message number `sequence` and returns those whose turn has come. `Err`: too many are held back.
    pub(crate) fn take(&mut self, sequence: u64, item: InboxItem) -> Result<Vec<InboxItem>> {
        // Beside numbers of the past: a second one of a number that is held.
        if sequence < self.next || self.held.contains_key(&sequence) {
            return Err(Error::corrupt(format!("message {sequence} came twice")));
        }
        self.held_bytes += item.len();
        self.held.insert(sequence, item);
        let mut due = Vec::new();
        while let Some(item) = self.held.remove(&self.next) {
            self.held_bytes -= item.len();
            self.next += 1;
            due.push(item);
        }
        if self.held.len() > MAX_HELD || self.held_bytes > MAX_HELD_BYTES {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!("message {} is missing, and {} after it have arrived", self.next, self.held.len()),
            ));
        }
        Ok(due)
    }
}

/// Adds `len` to the bytes of a send queue unless that passes `limit`. A message over the limit may go alone.
pub(crate) fn reserve(unsent: &AtomicU64, len: usize, limit: u64) -> Result<()> {
    let reserved = unsent.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |bytes| {
        let after = bytes.saturating_add(len as u64);
        (bytes == 0 || after <= limit).then_some(after)
    });
    match reserved {
        Ok(_) => Ok(()),
        Err(bytes) => Err(Error::new(
            ErrorKind::Exhausted,
            format!("{bytes} bytes of messages to this peer are not sent yet, {limit} are allowed; try again later"),
        )),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_out_in_order() {
        let mut inbox = Inbox::default();
        let item = |byte| InboxItem::Data(vec![byte]);
        assert!(inbox.take(1, item(1)).unwrap().is_empty());
        assert!(inbox.take(3, InboxItem::Goodbye).unwrap().is_empty());
        assert!(inbox.take(2, item(2)).unwrap().is_empty());
        assert_eq!(inbox.take(0, item(0)).unwrap(), [item(0), item(1), item(2), InboxItem::Goodbye]);
        assert_eq!(inbox.take(4, item(4)).unwrap(), [item(4)]);
        assert_eq!(inbox.held_bytes, 0);
    }

    #[test]
    fn repeated_number_is_refused() {
        let mut inbox = Inbox::default();
        let empty = || InboxItem::Data(Vec::new());
        inbox.take(0, empty()).unwrap();
        inbox.take(5, empty()).unwrap();
        assert_eq!(inbox.take(0, empty()).unwrap_err().kind(), ErrorKind::Corrupt);
        assert_eq!(inbox.take(5, empty()).unwrap_err().kind(), ErrorKind::Corrupt);
    }

    #[test]
    fn holding_back_has_a_bound() {
        let mut inbox = Inbox::default();
        let refused = (1..).find_map(|number| inbox.take(number, InboxItem::Data(Vec::new())).err()).unwrap();
        assert_eq!(refused.kind(), ErrorKind::Exhausted);
        assert!(refused.message().contains("message 0 is missing"), "{refused}");
    }

    #[test]
    fn send_queue_takes_one_large_message() {
        let unsent = std::sync::atomic::AtomicU64::new(0);
        reserve(&unsent, 500, 100).unwrap();
        assert_eq!(reserve(&unsent, 1, 100).unwrap_err().kind(), ErrorKind::Exhausted);
        unsent.store(40, Ordering::Relaxed);
        reserve(&unsent, 60, 100).unwrap();
        assert!(reserve(&unsent, 1, 100).is_err());
    }
}

//! Root objects as the C side holds them.
//!
//! A handle looks like a pointer and is none: it is a number that is never given out twice, and it is looked up. So a
//! null, foreign, stale or twice freed handle is an error, and freeing an object while another thread is in a call on it
//! is safe: that call keeps the object until it returns. A process that was forked off has a table of its own, whose numbers
//! begin where the other process's ended at the fork.

use std::any::Any;
use std::sync::Arc;

use super::table::{FIRST, NumberTable};
use crate::error::{Error, ErrorKind, Result};
use crate::sync::{AtomicUsize, RwLock};
use crate::sys::fork::{PerProcess, process_id};

/// An object behind a handle.
pub(super) trait Object: Any + Send + Sync {
    /// The opaque C type.
    type C;
    /// Its name in messages.
    const NOUN: &'static str;
}

struct HandleEntry {
    noun: &'static str,
    object: Arc<dyn Any + Send + Sync>,
}

struct LiveHandles {
    /// Numbers below are handles of the process from which this one was forked.
    first: usize,
    table: NumberTable<HandleEntry>,
}

static LIVE: PerProcess<LiveHandles> = PerProcess::new(|earlier: Option<&LiveHandles>| {
    let first = earlier.map_or(FIRST, |earlier| earlier.table.next());
    LiveHandles { first, table: NumberTable::from(RwLock::new(None), AtomicUsize::new(first)) }
});

/// Makes a handle for `object`.
pub(super) fn give<T: Object>(object: T) -> *mut T::C {
    let number = LIVE.get().table.insert(HandleEntry { noun: T::NOUN, object: Arc::new(object) });
    std::ptr::without_provenance_mut(number)
}

/// The object of a handle.
pub(super) fn get<T: Object>(handle: *mut T::C) -> Result<Arc<T>> {
    own::<T>(handle.addr())?.look(handle.addr(), |entry| checked::<T>(handle.addr(), entry))
}

/// Takes a handle out of use. The object lives until the last call on it returns.
pub(super) fn take<T: Object>(handle: *mut T::C) -> Result<Arc<T>> {
    let (object, entry) = own::<T>(handle.addr())?.take(handle.addr(), |entry| checked::<T>(handle.addr(), entry))?;
    drop(entry);
    Ok(object)
}

/// The table of this process, unless the handle is of another one's.
fn own<T: Object>(number: usize) -> Result<&'static NumberTable<HandleEntry>> {
    let live = LIVE.get();
    if number >= FIRST && number < live.first {
        return Err(Error::new(
            ErrorKind::ShutDown,
            format!(
                "this {} belongs to the process from which process {} was forked, and its threads stayed there at the fork; \
                 start processes by spawn, and make one here",
                T::NOUN,
                process_id()
            ),
        ));
    }
    Ok(&live.table)
}

fn checked<T: Object>(number: usize, entry: Option<&HandleEntry>) -> Result<Arc<T>> {
    if number == 0 {
        return Err(Error::invalid(format!("the {} handle is NULL", T::NOUN)));
    }
    let Some(entry) = entry else {
        return Err(Error::not_found(format!(
            "{number:#x} is no live {} handle: freed already, or never made",
            T::NOUN
        )));
    };
    Arc::clone(&entry.object)
        .downcast::<T>()
        .map_err(|_| Error::invalid(format!("this handle is of the kind {}, expected {}", entry.noun, T::NOUN)))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    struct CApple;
    #[derive(Debug)]
    struct Apple(u32);
    impl Object for Apple {
        type C = CApple;
        const NOUN: &'static str = "apple";
    }

    #[test]
    fn an_object_outlives_its_handle_while_a_call_uses_it() {
        let apple = give(Apple(5));
        let in_use = get::<Apple>(apple).unwrap();
        drop(take::<Apple>(apple).unwrap());
        assert_eq!(in_use.0, 5);
    }
}

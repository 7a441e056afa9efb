"""UCX's libraries, in the folder `lib`; kvferry finds them by itself."""

//! Cards of servers: what is observed, declared, unknown, and contradicted.

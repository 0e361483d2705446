/* The same random bytes for every process: loaded before the C library, so that the order of Rust's hash maps and tokio's choice
 * among ready branches follow from the program alone. For simulations only. */
#include <stddef.h>
#include <string.h>
#include <sys/types.h>

ssize_t getrandom(void *into, size_t length, unsigned int flags) {
    (void)flags;
    memset(into, 0x5a, length);
    return (ssize_t)length;
}

int getentropy(void *into, size_t length) {
    memset(into, 0x5a, length);
    return 0;
}

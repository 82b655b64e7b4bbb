/* A clock that jumps, for a process and its children: disturbed_run.py compiles it and preloads it.
 *
 * The file CLOCK_JUMP holds seconds, a 64-bit integer, that are added to the time of day, at once in all processes.
 * Clocks that measure durations stay. libfaketime does the same, but makes time.sleep() of Python fail. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>

static const volatile int64_t *jump = MAP_FAILED;

__attribute__((constructor)) static void map(void) {
    const char *path = getenv("CLOCK_JUMP");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file >= 0)
        jump = mmap(NULL, sizeof *jump, PROT_READ, MAP_SHARED, file, 0);
}

static int64_t seconds(void) { return jump == MAP_FAILED ? 0 : *jump; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*original)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = original(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)
        now->tv_sec += seconds();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    int failed = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *where) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where)
        *where = now.tv_sec;
    return now.tv_sec;
}

/* A deadline that is a time of day, which the kernel does not know to have jumped: where it seems long past, threads
 * of tensorstore would ask for it over and over. */
long syscall(long number, ...) {
    long (*original)(long, long, long, long, long, long, long) = dlsym(RTLD_NEXT, "syscall");
    long given[6];
    struct timespec here;
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++)
        given[i] = va_arg(rest, long);
    va_end(rest);
    if (number == SYS_futex && (given[1] & FUTEX_CLOCK_REALTIME) && given[3]) {
        here = *(const struct timespec *)given[3];
        if (here.tv_sec > seconds())
            here.tv_sec -= seconds();
        given[3] = (long)&here;
    }
    return original(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}

/* The same; a deadline of fewer seconds is not a time of day. */
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *deadline) {
    int (*original)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *) =
        dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2"); /* else perhaps one of before 2003 */
    if (!original)
        original = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec here = *deadline;
    if (here.tv_sec > 1000000000)
        here.tv_sec -= seconds();
    return original(condition, mutex, &here);
}

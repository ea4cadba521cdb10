// Writes each change of a file below POWER_ROOT, with its data, to POWER_LOG: see power.py. Loaded by LD_PRELOAD.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define LONG 4096

static const char *root;
static int output = -1;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static ssize_t (*put)(int, const void *, size_t);

__attribute__((constructor)) static void begin(void) {
    int (*real_open)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open");
    put = (ssize_t(*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    const char *log = getenv("POWER_LOG");
    root = getenv("POWER_ROOT");
    if (!root || !log) root = NULL;
    else output = real_open(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
}

// The absolute path of a name below a descriptor, or NULL if it is not below the root.
static const char *path_of(int at, const char *name, char *buffer) {
    if (!root) return NULL;
    if (name && name[0] == '/') {
        snprintf(buffer, LONG, "%s", name);
    } else {
        char link[64];
        if (at == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
        else snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        ssize_t n = readlink(link, buffer, LONG - 1);
        if (n < 0) return NULL;
        if (name) snprintf(buffer + n, LONG - n, "/%s", name);
        else buffer[n] = 0;
    }
    size_t n = strlen(root);
    return strncmp(buffer, root, n) || (buffer[n] && buffer[n] != '/') ? NULL : buffer;
}

static void note(const char *verb, const char *path, const char *to, long offset, const void *data, size_t size) {
    char head[3 * LONG];
    int n = snprintf(head, sizeof head, "%s\t%s\t%s\t%ld\t%zu\n", verb, path, to, offset, size);
    if (put(output, head, n) < 0 || (size && put(output, data, size) < 0)) abort();
}

// Do a call, and note the call if it has succeeded, in the order in which calls succeed.
#define NOTED(type, call, done, ...) \
    pthread_mutex_lock(&mutex); \
    type result = call; \
    int error = errno; \
    if (done) { __VA_ARGS__; } \
    pthread_mutex_unlock(&mutex); \
    errno = error; \
    return result

#define OPEN(name, parameters, at, arguments) \
    int name parameters { \
        REAL(name); \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { va_list list; va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); } \
        char b[LONG]; \
        const char *path = flags & (O_CREAT | O_TRUNC) ? path_of(at, file, b) : NULL; \
        if (!path) return real arguments; \
        NOTED(int, real arguments, result >= 0, note(flags & O_TRUNC ? "truncate" : "create", path, "", 0, NULL, 0)); \
    }
OPEN(open, (const char *file, int flags, ...), AT_FDCWD, (file, flags, mode))
OPEN(open64, (const char *file, int flags, ...), AT_FDCWD, (file, flags, mode))
OPEN(openat, (int at, const char *file, int flags, ...), at, (at, file, flags, mode))
OPEN(openat64, (int at, const char *file, int flags, ...), at, (at, file, flags, mode))

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    char b[LONG];
    const char *path = path_of(fd, NULL, b);
    if (!path) return real(fd, data, size);
    struct stat now;
    NOTED(ssize_t, real(fd, data, size), result > 0,
          fstat(fd, &now);
          long end = fcntl(fd, F_GETFL) & O_APPEND ? now.st_size : lseek(fd, 0, SEEK_CUR);
          note("write", path, "", end - result, data, result));
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    REAL(pwrite64);
    char b[LONG];
    const char *path = path_of(fd, NULL, b);
    if (!path) return real(fd, data, size, at);
    NOTED(ssize_t, real(fd, data, size, at), result > 0, note("write", path, "", at, data, result));
}

#define CHANGE(name, parameters, arguments, verb, where, size) \
    int name parameters { \
        REAL(name); \
        char b[LONG]; \
        const char *path = where; \
        if (!path) return real arguments; \
        NOTED(int, real arguments, !result, note(verb, path, "", size, NULL, 0)); \
    }
CHANGE(fsync, (int fd), (fd), "sync", path_of(fd, NULL, b), 0)
CHANGE(fdatasync, (int fd), (fd), "sync", path_of(fd, NULL, b), 0)
CHANGE(ftruncate64, (int fd, off64_t size), (fd, size), "resize", path_of(fd, NULL, b), size)
CHANGE(mkdir, (const char *file, mode_t mode), (file, mode), "mkdir", path_of(AT_FDCWD, file, b), 0)
CHANGE(unlink, (const char *file), (file), "remove", path_of(AT_FDCWD, file, b), 0)
CHANGE(rmdir, (const char *file), (file), "remove", path_of(AT_FDCWD, file, b), 0)
CHANGE(unlinkat, (int at, const char *file, int flags), (at, file, flags), "remove", path_of(at, file, b), 0)

int rename(const char *file, const char *to) {
    REAL(rename);
    char a[LONG], b[LONG];
    const char *from = path_of(AT_FDCWD, file, a), *onto = path_of(AT_FDCWD, to, b);
    if (!from || !onto) return real(file, to);
    NOTED(int, real(file, to), !result, note("rename", from, onto, 0, NULL, 0));
}

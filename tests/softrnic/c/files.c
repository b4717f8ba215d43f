/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * What the C library's functions say of a path, each on a line of its own:
 *
 *   files PATH              what there is
 *   files --restless PATH   the same from signals' handlers, threads and forked children, until all have had enough
 */
#undef _FORTIFY_SOURCE
#undef _FILE_OFFSET_BITS

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

/* What headers do not declare, or only where they define it otherwise. */
int __open_2(const char *path, int flags);
int __open64_2(const char *path, int flags);
int __openat_2(int fd, const char *path, int flags);
int __openat64_2(int fd, const char *path, int flags);
int __xstat(int version, const char *path, struct stat *to);
int __xstat64(int version, const char *path, struct stat64 *to);
int __lxstat(int version, const char *path, struct stat *to);
int __lxstat64(int version, const char *path, struct stat64 *to);
int __fxstatat(int version, int fd, const char *path, struct stat *to, int flags);
int __fxstatat64(int version, int fd, const char *path, struct stat64 *to, int flags);
char *__realpath_chk(const char *path, char *resolved, size_t size);
ssize_t __readlink_chk(const char *path, char *to, size_t len, size_t size);
ssize_t __readlinkat_chk(int fd, const char *path, char *to, size_t len, size_t size);

#ifdef __x86_64__
#define STAT_VERSION 1
#else
#define STAT_VERSION 0
#endif

static const char *error(int rc) {
    return rc < 0 ? strerrorname_np(errno) : "ok";
}

#define SHOW_STAT(call)                                                                                      \
    do {                                                                                                     \
        errno = 0;                                                                                           \
        memset(&to, 0, sizeof(to));                                                                          \
        rc = call;                                                                                           \
        printf("%s: %s", #call, error(rc));                                                                  \
        if (!rc)                                                                                             \
            printf(" mode=%o rdev=%u:%u size=%lld ino=%llu", to.st_mode, major(to.st_rdev),                  \
                   minor(to.st_rdev), (long long)to.st_size, (unsigned long long)to.st_ino);                 \
        printf("\n");                                                                                        \
    } while (0)

static void show_stat(const char *path) {
    struct stat to;
    int rc;

    SHOW_STAT(stat(path, &to));
    SHOW_STAT(fstatat(AT_FDCWD, path, &to, 0));
    SHOW_STAT(__xstat(STAT_VERSION, path, &to));
    SHOW_STAT(__fxstatat(STAT_VERSION, AT_FDCWD, path, &to, 0));
    SHOW_STAT(lstat(path, &to));
    SHOW_STAT(fstatat(AT_FDCWD, path, &to, AT_SYMLINK_NOFOLLOW));
    SHOW_STAT(__lxstat(STAT_VERSION, path, &to));
    SHOW_STAT(__fxstatat(STAT_VERSION, AT_FDCWD, path, &to, AT_SYMLINK_NOFOLLOW));
}

static void show_stat64(const char *path) {
    struct stat64 to;
    int rc;

    SHOW_STAT(stat64(path, &to));
    SHOW_STAT(fstatat64(AT_FDCWD, path, &to, 0));
    SHOW_STAT(__xstat64(STAT_VERSION, path, &to));
    SHOW_STAT(__fxstatat64(STAT_VERSION, AT_FDCWD, path, &to, 0));
    SHOW_STAT(lstat64(path, &to));
    SHOW_STAT(fstatat64(AT_FDCWD, path, &to, AT_SYMLINK_NOFOLLOW));
    SHOW_STAT(__lxstat64(STAT_VERSION, path, &to));
    SHOW_STAT(__fxstatat64(STAT_VERSION, AT_FDCWD, path, &to, AT_SYMLINK_NOFOLLOW));
}

static void show_statx(const char *path, const char *how, int flags) {
    struct statx to;
    int rc;

    errno = 0;
    rc = statx(AT_FDCWD, path, flags, STATX_BASIC_STATS, &to);
    printf("statx(path, %s): %s", how, error(rc));
    if (!rc)
        printf(" mode=%o rdev=%u:%u size=%lld ino=%llu", to.stx_mode, to.stx_rdev_major, to.stx_rdev_minor,
               (long long)to.stx_size, (unsigned long long)to.stx_ino);
    printf("\n");
}

#define SHOW(call)                                                                                           \
    do {                                                                                                     \
        errno = 0;                                                                                           \
        printf("%s: %s\n", #call, error(call));                                                              \
    } while (0)

static void show_access(const char *path) {
    SHOW(access(path, F_OK));
    SHOW(access(path, R_OK));
    SHOW(access(path, W_OK));
    SHOW(access(path, X_OK));
    SHOW(euidaccess(path, R_OK | W_OK));
    SHOW(eaccess(path, R_OK | W_OK));
    SHOW(faccessat(AT_FDCWD, path, R_OK, 0));
    SHOW(faccessat(AT_FDCWD, path, R_OK | W_OK, AT_EACCESS));
}

#define SHOW_LINK(call)                                                                                      \
    do {                                                                                                     \
        errno = 0;                                                                                           \
        len = call;                                                                                          \
        printf("%s: %s %.*s\n", #call, error(len < 0 ? -1 : 0), len < 0 ? 0 : (int)len, to);                 \
    } while (0)
#define SHOW_PATH(call)                                                                                      \
    do {                                                                                                     \
        errno = 0;                                                                                           \
        found = call;                                                                                        \
        printf("%s: %s %s\n", #call, error(found ? 0 : -1), found ? found : "");                             \
        if (found && found != to)                                                                            \
            free(found);                                                                                     \
    } while (0)

static void show_links(const char *path) {
    char to[PATH_MAX];
    ssize_t len;
    char *found;

    SHOW_LINK(readlink(path, to, sizeof(to)));
    SHOW_LINK(readlink(path, to, 5));
    SHOW_LINK(readlinkat(AT_FDCWD, path, to, sizeof(to)));
    SHOW_LINK(__readlink_chk(path, to, 100, sizeof(to)));
    SHOW_LINK(__readlinkat_chk(AT_FDCWD, path, to, 100, sizeof(to)));
    SHOW_PATH(realpath(path, NULL));
    SHOW_PATH(realpath(path, to));
    SHOW_PATH(__realpath_chk(path, to, sizeof(to)));
    SHOW_PATH(canonicalize_file_name(path));
}

static void read_all(int fd) {
    char text[200];
    ssize_t len = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);

    if (fd >= 0 && len < 0)
        printf(" read: %s", error(-1));
    while (len > 0 && text[len - 1] == '\n')
        len--;
    printf("%s%.*s%s\n", len < 0 ? "" : " \"", len < 0 ? 0 : (int)len, text, len < 0 ? "" : "\"");
    if (fd >= 0)
        close(fd);
}

#define SHOW_OPEN(call)                                                                                      \
    do {                                                                                                     \
        errno = 0;                                                                                           \
        fd = call;                                                                                           \
        printf("%s: %s%s", #call, error(fd), fd >= 0 && fcntl(fd, F_GETFD) & FD_CLOEXEC ? " cloexec" : "");  \
        read_all(fd);                                                                                        \
    } while (0)
#define SHOW_STREAM(call)                                                                                    \
    do {                                                                                                     \
        errno = 0;                                                                                           \
        stream = call;                                                                                       \
        printf("%s: %s", #call, error(stream ? 0 : -1));                                                     \
        read_all(stream ? dup(fileno(stream)) : -1);                                                         \
        if (stream)                                                                                          \
            fclose(stream);                                                                                  \
    } while (0)

static void show_open(const char *path) {
    FILE *stream;
    int fd;

    SHOW_OPEN(open(path, O_RDONLY));
    SHOW_OPEN(open(path, O_RDONLY | O_CLOEXEC));
    SHOW_OPEN(open(path, O_RDONLY | O_NOFOLLOW));
    SHOW_OPEN(open(path, O_WRONLY));
    if (access(path, F_OK) == 0)
        SHOW_OPEN(open(path, O_WRONLY | O_CREAT | O_EXCL, 0600));
    SHOW_OPEN(open64(path, O_RDONLY));
    SHOW_OPEN(openat(AT_FDCWD, path, O_RDONLY));
    SHOW_OPEN(openat64(AT_FDCWD, path, O_RDONLY));
    SHOW_OPEN(__open_2(path, O_RDONLY));
    SHOW_OPEN(__open64_2(path, O_RDONLY));
    SHOW_OPEN(__openat_2(AT_FDCWD, path, O_RDONLY));
    SHOW_OPEN(__openat64_2(AT_FDCWD, path, O_RDONLY));
    SHOW_STREAM(fopen(path, "r"));
    SHOW_STREAM(fopen(path, "re"));
    SHOW_STREAM(fopen(path, "r+"));
    SHOW_STREAM(fopen64(path, "r"));
}

#define SHOW_NAMES(read)                                                                                     \
    do {                                                                                                     \
        printf("%s:", #read);                                                                                \
        while ((entry = read(dir)))                                                                          \
            printf(" %s/%u", entry->d_name, entry->d_type);                                                  \
        printf("\n");                                                                                        \
    } while (0)

static void show_names(const char *path) {
    DIR *dir;

    errno = 0;
    dir = opendir(path);
    printf("opendir(path): %s\n", error(dir ? 0 : -1));
    if (!dir)
        return;
    {
        struct dirent *entry;
        SHOW_NAMES(readdir);
    }
    rewinddir(dir);
    {
        struct dirent64 *entry;
        SHOW_NAMES(readdir64);
    }
    SHOW(dirfd(dir));
    SHOW(closedir(dir));
}

/* --- from where only little may be done --- */

#define ENOUGH 200

static const char *asked;
static atomic_int answers, wrong;

/* Only what POSIX lets a signal's handler call. */
static void ask(void) {
    char target[100];
    struct stat to;

    if (stat(asked, &to) || access(asked, R_OK) || readlink(asked, target, sizeof(target)) < 0)
        wrong++;
    answers++;
}

static void on_signal(int number) {
    int saved = errno;

    (void)number;
    ask();
    errno = saved;
}

static void *in_thread(void *nothing) {
    while (answers < ENOUGH)
        ask();
    return nothing;
}

static int restless(const char *path) {
    const struct itimerval soon = {.it_value.tv_usec = 200};
    pthread_t threads[2];
    int status, children = 0;

    asked = path;
    signal(SIGALRM, on_signal);
    for (int i = 0; i < 2; i++)
        pthread_create(&threads[i], NULL, in_thread, NULL);
    while (answers < ENOUGH || children < 20) {
        pid_t child;

        /* Once each time: a handler may take longer than until the next. */
        setitimer(ITIMER_REAL, &soon, NULL);
        child = fork();

        if (child == 0) {
            ask();
            _exit(wrong != 0);
        }
        /* Memory and a file are in use where the signal comes. */
        free(realpath(path, NULL));
        while (waitpid(child, &status, 0) < 0)
            ;
        if (status)
            wrong++;
        children++;
    }
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    printf("%s\n", wrong ? "wrong" : "right");
    return wrong != 0;
}

int main(int argc, char **argv) {
    const char *path = argv[argc - 1];

    if (argc > 2)
        return restless(path);
    show_stat(path);
    show_stat64(path);
    show_statx(path, "0", 0);
    show_statx(path, "AT_SYMLINK_NOFOLLOW", AT_SYMLINK_NOFOLLOW);
    show_access(path);
    show_links(path);
    show_open(path);
    show_names(path);
    return 0;
}

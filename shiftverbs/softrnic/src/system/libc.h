/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The C library's functions that this folder stands before, and the ones behind them. To be included first: what
 * builds define for the C library's headers would give the names other meanings.
 */
#ifndef SOFTRNIC_SYSTEM_LIBC_H
#define SOFTRNIC_SYSTEM_LIBC_H

#undef _FORTIFY_SOURCE
#undef _FILE_OFFSET_BITS
#undef _TIME_BITS

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define SYSTEM_EXPORT __attribute__((visibility("default")))

/* What headers do not declare: what programs call that were built with _FORTIFY_SOURCE, or with a glibc before 2.33. */
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

/* All are looked up when the library is loaded, so that no signal's handler has to. */
#define SYSTEM_FUNCTIONS(X)                                                                                  \
    X(open)                                                                                                  \
    X(open64)                                                                                                \
    X(openat)                                                                                                \
    X(openat64)                                                                                              \
    X(__open_2)                                                                                              \
    X(__open64_2)                                                                                            \
    X(__openat_2)                                                                                            \
    X(__openat64_2)                                                                                          \
    X(fopen)                                                                                                 \
    X(fopen64)                                                                                               \
    X(stat)                                                                                                  \
    X(stat64)                                                                                                \
    X(lstat)                                                                                                 \
    X(lstat64)                                                                                               \
    X(fstatat)                                                                                               \
    X(fstatat64)                                                                                             \
    X(statx)                                                                                                 \
    X(__xstat)                                                                                               \
    X(__xstat64)                                                                                             \
    X(__lxstat)                                                                                              \
    X(__lxstat64)                                                                                            \
    X(__fxstatat)                                                                                            \
    X(__fxstatat64)                                                                                          \
    X(access)                                                                                                \
    X(faccessat)                                                                                             \
    X(euidaccess)                                                                                            \
    X(eaccess)                                                                                               \
    X(readlink)                                                                                              \
    X(readlinkat)                                                                                            \
    X(__readlink_chk)                                                                                        \
    X(__readlinkat_chk)                                                                                      \
    X(realpath)                                                                                              \
    X(__realpath_chk)                                                                                        \
    X(canonicalize_file_name)                                                                                \
    X(opendir)                                                                                               \
    X(readdir)                                                                                               \
    X(readdir64)                                                                                             \
    X(rewinddir)                                                                                             \
    X(closedir)                                                                                              \
    X(dirfd)

#define SYSTEM_SLOT(name) SYSTEM_##name,
enum system_function { SYSTEM_FUNCTIONS(SYSTEM_SLOT) SYSTEM_FUNCTION_COUNT };
#undef SYSTEM_SLOT

/* libc.c: NULL where there is none. */
void *system_behind(enum system_function function);

#define SYSTEM_REAL(name) ((__typeof__(&name))system_behind(SYSTEM_##name))
/* Call it, or give `otherwise` where there is none. */
#define SYSTEM_PASS(name, otherwise, ...)                                                                    \
    ({                                                                                                       \
        __typeof__(&name) real_ = SYSTEM_REAL(name);                                                         \
        real_ ? real_(__VA_ARGS__) : (errno = ENOSYS, otherwise);                                            \
    })

#endif

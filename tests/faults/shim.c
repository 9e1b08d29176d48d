/* System calls that fail on demand, loaded with LD_PRELOAD (glibc on Linux). Until fault_arm() every call goes straight
 * to the system; then the calls of one class are counted and the n-th of them suffers. Files outside one folder are
 * left alone, and so is memory that anything but the C core asks for: Python and numpy must live on to tell what
 * happened. shim.py drives it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Classes of calls, a mask. */
enum { READ = 1, WRITE = 2, RESERVE = 4, SYNC = 8, RENAME = 16, UNLINK = 32, ALLOCATE = 64, CREATE = 128 };

/* What the n-th call suffers. */
enum {
    FAIL,       /* it fails with errno `value` */
    FAIL_FROM,  /* so do all after it */
    SHORT,      /* it and all after it move at most `value` bytes */
    INTERRUPT,  /* every second call from it on fails with EINTR */
    KILL,       /* the process dies before it; of a write half is done */
    KILL_AFTER, /* the process dies after it */
    TRUNCATE,   /* its file is cut to `value` bytes before it */
};

static struct {
    bool armed;
    int classes, action;
    long nth, value;
    long calls; /* of the classes, since it was armed */
    size_t folder_size;
    char folder[PATH_MAX];
} plan;

/* Of each call but reads, which threads share, a line: its letter and its path, of a rename both. */
static char trace[1 << 16];
static size_t traced;

static void note(char letter, const char *path, const char *target) {
    int size = snprintf(trace + traced, sizeof trace - traced, "%c %s\t%s\n", letter, path, target);
    if (size > 0 && traced + (size_t)size < sizeof trace) traced += (size_t)size;
}

void fault_arm(const char *folder, int classes, int action, long nth, long value) {
    snprintf(plan.folder, sizeof plan.folder, "%s/", folder);
    plan.folder_size = strlen(plan.folder);
    plan.classes = classes;
    plan.action = action;
    plan.nth = nth;
    plan.value = value;
    plan.calls = 0;
    traced = 0;
    trace[0] = '\0';
    __atomic_store_n(&plan.armed, true, __ATOMIC_SEQ_CST);
}

/* How many calls of the classes there were. */
long fault_disarm(void) {
    __atomic_store_n(&plan.armed, false, __ATOMIC_SEQ_CST);
    return plan.calls;
}

const char *fault_trace(void) { return trace; }

static bool watched(int class) { return __atomic_load_n(&plan.armed, __ATOMIC_SEQ_CST) && (plan.classes & class) != 0; }

/* Whether a path is the folder or in it. */
static bool inside(const char *path) {
    size_t size = strlen(path);
    return strncmp(path, plan.folder, size + 1 == plan.folder_size ? size : plan.folder_size) == 0;
}

/* Whether calls of a class with this descriptor are counted; then its path. */
static bool counted(int class, int file, char path[PATH_MAX]) {
    if (!watched(class)) return false;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, PATH_MAX - 1);
    if (size <= 0) return false;
    path[size] = '\0';
    return inside(path);
}

/* What one call suffers. */
typedef struct fault {
    bool fails, dies, dies_after, truncates, is_short;
} fault;

static fault strike(void) {
    long call = __atomic_add_fetch(&plan.calls, 1, __ATOMIC_SEQ_CST);
    bool now = call == plan.nth, due = call >= plan.nth;
    fault result = {
        .fails = (plan.action == FAIL && now) || (plan.action == FAIL_FROM && due) ||
                 (plan.action == INTERRUPT && due && (call - plan.nth) % 2 == 0),
        .dies = plan.action == KILL && now,
        .dies_after = plan.action == KILL_AFTER && now,
        .truncates = plan.action == TRUNCATE && now,
        .is_short = plan.action == SHORT && due,
    };
    if (result.fails) errno = plan.action == INTERRUPT ? EINTR : (int)plan.value;
    return result;
}

static void die_if(bool so) {
    if (!so) return;
    raise(SIGKILL);
    for (;;) pause();
}

/* read and write, where `offset` is NULL, or their system calls at an offset. */
static ssize_t transfer(int class, int file, void *memory, size_t size, const off_t *offset) {
    long number = class == READ ? offset != NULL ? SYS_pread64 : SYS_read : offset != NULL ? SYS_pwrite64 : SYS_write;
    fault fate = {0};
    char path[PATH_MAX];
    if (counted(class, file, path)) {
        if (class == WRITE) note('W', path, "");
        fate = strike();
        if (fate.fails) return -1;
        if (fate.truncates && truncate(path, plan.value) != 0) return -1;
        if (fate.is_short && size > (size_t)plan.value) size = (size_t)plan.value;
        if (fate.dies && class == WRITE) size /= 2;
    }
    ssize_t moved = offset != NULL ? syscall(number, file, memory, size, *offset) : syscall(number, file, memory, size);
    die_if(fate.dies || fate.dies_after);
    return moved;
}

ssize_t read(int file, void *memory, size_t size) { return transfer(READ, file, memory, size, NULL); }
ssize_t pread(int file, void *memory, size_t size, off_t offset) { return transfer(READ, file, memory, size, &offset); }
ssize_t pread64(int file, void *memory, size_t size, off_t offset) {
    return transfer(READ, file, memory, size, &offset);
}

ssize_t write(int file, const void *memory, size_t size) {
    return transfer(WRITE, file, (void *)(uintptr_t)memory, size, NULL);
}

ssize_t pwrite(int file, const void *memory, size_t size, off_t offset) {
    return transfer(WRITE, file, (void *)(uintptr_t)memory, size, &offset);
}

ssize_t pwrite64(int file, const void *memory, size_t size, off_t offset) { return pwrite(file, memory, size, offset); }

ssize_t copy_file_range(int from, off_t *begin, int file, off_t *at, size_t size, unsigned flags) {
    fault fate = {0};
    char path[PATH_MAX];
    if (counted(WRITE, file, path)) {
        note('W', path, "");
        fate = strike();
        if (fate.fails) return -1;
        if (fate.is_short && size > (size_t)plan.value) size = (size_t)plan.value;
        if (fate.dies) size /= 2;
    }
    ssize_t moved = syscall(SYS_copy_file_range, from, begin, file, at, size, flags);
    die_if(fate.dies || fate.dies_after);
    return moved;
}

int fallocate(int file, int mode, off_t offset, off_t size) {
    fault fate = {0};
    char path[PATH_MAX];
    if (counted(RESERVE, file, path)) {
        note('A', path, "");
        fate = strike();
        if (fate.fails) return -1;
    }
    die_if(fate.dies);
    int result = (int)syscall(SYS_fallocate, file, mode, offset, size);
    die_if(fate.dies_after);
    return result;
}

int fallocate64(int file, int mode, off_t offset, off_t size) { return fallocate(file, mode, offset, size); }

int fsync(int file) {
    fault fate = {0};
    char path[PATH_MAX];
    if (counted(SYNC, file, path)) {
        note('S', path, "");
        fate = strike();
        if (fate.fails) return -1;
    } else {
        return (int)syscall(SYS_fsync, file);
    }
    die_if(fate.dies || fate.dies_after);
    return 0; /* the disk is not waited for: no power is cut here */
}

int fdatasync(int file) { return fsync(file); }

/* rename and link, by the number of their system calls with descriptors of folders. */
static int give_name(long number, char letter, const char *from, const char *to) {
    fault fate = {0};
    if (watched(RENAME) && inside(to)) {
        note(letter, from, to);
        fate = strike();
        if (fate.fails) return -1;
    }
    die_if(fate.dies);
    int result = (int)syscall(number, AT_FDCWD, from, AT_FDCWD, to, 0);
    die_if(fate.dies_after);
    return result;
}

int rename(const char *from, const char *to) { return give_name(SYS_renameat2, 'N', from, to); }
int link(const char *from, const char *to) { return give_name(SYS_linkat, 'L', from, to); }

/* A call that removes or makes a name, by the number of its system call with a descriptor of a folder. */
static int change_name(int class, char letter, long number, const char *path, long first, long second) {
    fault fate = {0};
    if (watched(class) && inside(path)) {
        note(letter, path, "");
        fate = strike();
        if (fate.fails) return -1;
    }
    die_if(fate.dies);
    int result = (int)syscall(number, AT_FDCWD, path, first, second);
    die_if(fate.dies_after);
    return result;
}

int unlink(const char *path) { return change_name(UNLINK, 'U', SYS_unlinkat, path, 0, 0); }
int rmdir(const char *path) { return change_name(UNLINK, 'U', SYS_unlinkat, path, AT_REMOVEDIR, 0); }
int mkdir(const char *path, mode_t mode) { return change_name(CREATE, 'C', SYS_mkdirat, path, mode, 0); }

/* Only calls that may create a file are counted. */
int open(const char *path, int flags, ...) {
    va_list list;
    va_start(list, flags);
    mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(list, mode_t) : 0;
    va_end(list);
    if ((flags & O_CREAT) != 0) return change_name(CREATE, 'C', SYS_openat, path, flags, mode);
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    va_list list;
    va_start(list, flags);
    mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(list, mode_t) : 0;
    va_end(list);
    return open(path, flags, mode);
}

/* ---- memory ---- */

/* glibc's own; dlsym, which would find them, allocates itself. */
extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *memory, size_t size);

/* Whether memory that is asked for from this place in the code is refused. */
static bool refused(const void *caller) {
    Dl_info info;
    if (!watched(ALLOCATE) || dladdr(caller, &info) == 0 || strstr(info.dli_fname, "/safeload/_core.") == NULL)
        return false;
    return strike().fails;
}

void *malloc(size_t size) { return refused(__builtin_return_address(0)) ? NULL : __libc_malloc(size); }

void *calloc(size_t count, size_t size) {
    return refused(__builtin_return_address(0)) ? NULL : __libc_calloc(count, size);
}

void *realloc(void *memory, size_t size) {
    return refused(__builtin_return_address(0)) ? NULL : __libc_realloc(memory, size);
}

void *mmap(void *address, size_t size, int protection, int flags, int file, off_t offset) {
    if (refused(__builtin_return_address(0))) return MAP_FAILED;
    return (void *)syscall(SYS_mmap, address, size, protection, flags, file, offset);
}

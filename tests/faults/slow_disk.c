/* A disk that takes its time: each fdatasync lasts so many milliseconds longer as the file SLOW_DISK_FILE says. By that,
   on Linux, PostgreSQL flushes its WAL, for which commits wait. Not fsync: a server that recovers from a crash does that
   to each of some thousand files first. Loaded into the server's processes by LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static void wait_for_disk(void)
{
    const char *path = getenv("SLOW_DISK_FILE");
    char text[16] = "";
    int file, before = errno;
    long ms;

    if (path == NULL || (file = open(path, O_RDONLY | O_CLOEXEC)) < 0)
        return;
    if (read(file, text, sizeof text - 1) > 0 && (ms = atol(text)) > 0)
    {
        struct timespec left = {ms / 1000, ms % 1000 * 1000000};
        while (nanosleep(&left, &left) != 0 && errno == EINTR)
            ;
    }
    close(file);
    errno = before;
}

int fdatasync(int file)
{
    wait_for_disk();
    return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(file);
}

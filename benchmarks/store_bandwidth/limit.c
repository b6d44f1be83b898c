/* Reads and writes values as fast as a program can: one thread and one connection per
 * share of the keys, writev from and recv(MSG_WAITALL) into the values' own memory.
 *
 *   limit HOST PORT SIZE CONNECTIONS SET_DEPTH GET_DEPTH KEYS_FILE VALUES_FILE
 *
 * KEYS_FILE has one key per line; value i is bytes [i * SIZE, (i + 1) * SIZE) of
 * VALUES_FILE. For each line "set" or "get" on standard input it does that with all
 * values and prints the seconds from the first byte to the last, of the slowest
 * connection. What was read is compared with VALUES_FILE afterwards. Connections stay,
 * as those of the other clients do; on each, so many commands are ahead of their
 * replies.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MAX_KEYS 65536
#define MAX_CONNECTIONS 64

static const char *host, *keys[MAX_KEYS];
static int port, is_set, num_connections, set_depth, get_depth, num_keys;
static int links[MAX_CONNECTIONS];
static size_t size;
static char *values, *buffers;
static pthread_barrier_t ready;

static void fail(const char *what) {
  perror(what);
  exit(1);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static char *memory(size_t length) {
  char *at = mmap(0, length, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (at == MAP_FAILED) fail("mmap");
  return at;
}

static void write_all(int fd, struct iovec *iov, int count) {
  while (count) {
    ssize_t sent = writev(fd, iov, count);
    if (sent < 0) fail("writev");
    while (count && (size_t)sent >= iov->iov_len) {
      sent -= iov->iov_len;
      iov++, count--;
    }
    if (count) {
      iov->iov_base = (char *)iov->iov_base + sent;
      iov->iov_len -= sent;
    }
  }
}

static void read_all(int fd, char *to, size_t length) {
  while (length) {
    ssize_t got = recv(fd, to, length, MSG_WAITALL);
    if (got <= 0) fail("recv");
    to += got, length -= got;
  }
}

static int dial(void) {
  int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
  inet_pton(AF_INET, host, &address.sin_addr);
  if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address)) fail("connect");
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  return fd;
}

/* The command that ours sends too. */
static void send_set(int fd, int key) {
  char head[256], tail[] = "\r\n$2\r\nNX\r\n$2\r\nPX\r\n$7\r\n3600000\r\n";
  int length = snprintf(head, sizeof head, "*6\r\n$3\r\nSET\r\n$%zu\r\n%s\r\n$%zu\r\n",
                        strlen(keys[key]), keys[key], size);
  struct iovec iov[3] = {
      {head, length}, {values + key * size, size}, {tail, sizeof tail - 1}};
  write_all(fd, iov, 3);
}

static void send_get(int fd, int key) {
  char command[256];
  int length = snprintf(command, sizeof command, "*2\r\n$3\r\nGET\r\n$%zu\r\n%s\r\n",
                        strlen(keys[key]), keys[key]);
  struct iovec iov = {command, length};
  write_all(fd, &iov, 1);
}

static void receive(int fd, int key) {
  char expected[32], got[32];
  if (is_set) {
    read_all(fd, got, 5);
    if (memcmp(got, "+OK\r\n", 5)) fail("SET was refused");
    return;
  }
  int length = snprintf(expected, sizeof expected, "$%zu\r\n", size);
  read_all(fd, got, length);
  if (memcmp(got, expected, length)) fail("GET found something else");
  read_all(fd, buffers + key * size, size);
  read_all(fd, got, 2);
}

static void *run(void *argument) {
  int share = (int)(long)argument, fd = links[share];
  double *took = malloc(sizeof *took);
  pthread_barrier_wait(&ready);
  double start = now();
  int asked = share, depth = is_set ? set_depth : get_depth;
  for (int key = share; key < num_keys; key += num_connections) {
    for (; asked < num_keys && asked < key + depth * num_connections;
         asked += num_connections)
      is_set ? send_set(fd, asked) : send_get(fd, asked);
    receive(fd, key);
  }
  *took = now() - start;
  return took;
}

static double run_all(void) {
  pthread_t threads[MAX_CONNECTIONS];
  double slowest = 0;
  for (long i = 1; i < num_connections; i++)
    if (pthread_create(&threads[i], 0, run, (void *)i)) fail("pthread_create");
  for (int i = 0; i < num_connections; i++) {
    void *took;
    if (i)
      pthread_join(threads[i], &took);
    else
      took = run(0);
    if (*(double *)took > slowest) slowest = *(double *)took;
    free(took);
  }
  return slowest;
}

/* Wakes this thread up for good, so that it has a core of its own when time starts: a
 * client in a program that works has one. */
static void wake_up(void) {
  memset(buffers, 0, size * num_keys);
}

int main(int argc, char **argv) {
  if (argc != 9) return 2;
  host = argv[1], port = atoi(argv[2]), size = strtoull(argv[3], 0, 10);
  num_connections = atoi(argv[4]);
  set_depth = atoi(argv[5]), get_depth = atoi(argv[6]);
  if (num_connections < 1 || num_connections > MAX_CONNECTIONS) return 2;
  FILE *file = fopen(argv[7], "r");
  char line[512];
  while (file && num_keys < MAX_KEYS && fgets(line, sizeof line, file)) {
    line[strcspn(line, "\n")] = 0;
    keys[num_keys++] = strdup(line);
  }
  int fd = open(argv[8], O_RDONLY);
  size_t total = size * num_keys;
  values = memory(total);
  buffers = memory(total);
  for (size_t done = 0; done < total;) {
    ssize_t got = read(fd, values + done, total - done);
    if (got <= 0) fail("read");
    done += got;
  }
  close(fd);
  pthread_barrier_init(&ready, 0, num_connections);
  for (int i = 0; i < num_connections; i++) links[i] = dial();
  while (fgets(line, sizeof line, stdin)) {
    is_set = !strcmp(line, "set\n");
    wake_up();
    double took = run_all();
    if (!is_set && memcmp(values, buffers, total)) {
      fprintf(stderr, "wrong bytes\n");
      return 1;
    }
    printf("%.9f\n", took);
    fflush(stdout);
  }
  return 0;
}
